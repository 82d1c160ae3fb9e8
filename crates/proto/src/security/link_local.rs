//! Addresses that no engine has, and that cloud hosts answer with credentials on.

use std::net::IpAddr;

/// Whether `ip` is link-local or a metadata service's.
#[must_use]
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(v4) => v4.is_link_local(),
        // fe80::/10, and the metadata address of one large cloud.
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[..3] == [0xfd00, 0x0ec2, 0],
    }
}

/// Whether a URL's host, a name or an address with or without brackets, is one of them as it is written.
#[must_use]
pub fn names_link_local(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches([']', '.']);
    match host.parse::<IpAddr>() {
        Ok(ip) => is_link_local(ip),
        Err(_) => host.eq_ignore_ascii_case("metadata.google.internal") || host.eq_ignore_ascii_case("metadata"),
    }
}
