//! The rule for what may be reached from other hosts.

use std::net::{IpAddr, SocketAddr};

use super::{Credentials, Security, SecurityError};

/// Names of the settings that aren't there, joined for a message; empty where all are.
fn missing(settings: &[(bool, &'static str)]) -> String {
    let names: Vec<&str> = settings
        .iter()
        .filter(|(given, _)| !given)
        .map(|(_, name)| *name)
        .collect();
    names.join(", ")
}

pub(super) fn check_bind(security: &Security, address: SocketAddr) -> Result<(), SecurityError> {
    if is_loopback(address.ip()) {
        return Ok(());
    }
    let missing = missing(&[
        (security.cluster_token_file.is_some(), "cluster_token_file"),
        (security.tls_cert_file.is_some(), "tls_cert_file"),
        (security.tls_key_file.is_some(), "tls_key_file"),
    ]);
    if missing.is_empty() {
        return Ok(());
    }
    Err(SecurityError::OpenPort {
        address: address.to_string(),
        missing,
    })
}

pub(super) fn check_call(credentials: &Credentials, host: &str) -> Result<(), SecurityError> {
    let literal = host.trim_start_matches('[').trim_end_matches(']');
    let loopback = literal == "localhost" || literal.parse::<IpAddr>().is_ok_and(is_loopback);
    if loopback {
        return Ok(());
    }
    let missing = missing(&[
        (credentials.token.is_some(), "cluster_token_file"),
        (credentials.authorities.is_some(), "tls_ca_file"),
    ]);
    if missing.is_empty() {
        return Ok(());
    }
    Err(SecurityError::OpenCall {
        address: host.to_owned(),
        missing,
    })
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
