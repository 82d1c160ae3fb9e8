//! Tenants: who a request is from by its key, and the salt that separates its cache from everybody else's.

use std::path::Path;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::config::TenantConfig;
use crate::error::ApiError;

/// Largest key file in bytes.
const KEY_BYTES_MAX: u64 = 4_096;

/// All tenants; none means that everybody shares.
#[derive(Default)]
pub(crate) struct Tenants {
    all: Vec<Tenant>,
}

struct Tenant {
    name: String,
    /// Hash of the key that clients show, compared in constant time over all tenants.
    key: [u8; 32],
    secret: Vec<u8>,
}

/// A tenant whose files can't be used.
#[derive(Debug, thiserror::Error)]
#[error("tenant {tenant}: {} {problem}", path.display())]
pub(crate) struct TenantError {
    tenant: String,
    path: std::path::PathBuf,
    problem: String,
}

impl Tenants {
    /// Reads the files of all tenants.
    pub(crate) fn load(config: &[TenantConfig]) -> Result<Self, TenantError> {
        let mut all: Vec<Tenant> = Vec::new();
        for told in config {
            let key = read(told, &told.api_key_file)?;
            let secret = match &told.secret_file {
                Some(path) => read(told, path)?,
                None => hmac(&key, b"cairn tenant secret"),
            };
            let key: [u8; 32] = Sha256::digest(&key).into();
            if all.iter().any(|other| other.key == key || other.name == told.name) {
                return Err(TenantError {
                    tenant: told.name.clone(),
                    path: told.api_key_file.clone(),
                    problem: "has the key or name of another tenant; give each its own".into(),
                });
            }
            all.push(Tenant {
                name: told.name.clone(),
                key,
                secret,
            });
        }
        Ok(Self { all })
    }

    /// The salt of a request: the client's own where there are no tenants, else one that only this tenant gets.
    ///
    /// Gives the salt that keys are made with, and whether it replaces the one in the body.
    pub(crate) fn salt(
        &self,
        headers: &http::HeaderMap,
        client_salt: Option<&str>,
    ) -> Result<(String, bool), ApiError> {
        if self.all.is_empty() {
            return Ok((client_salt.unwrap_or_default().to_string(), false));
        }
        let shown = headers
            .get(http::header::AUTHORIZATION)
            .map(|value| value.as_bytes())
            .and_then(|value| value.strip_prefix(b"Bearer "))
            .unwrap_or_default();
        let shown: [u8; 32] = Sha256::digest(shown).into();
        let found = self.all.iter().fold(None, |found, tenant| {
            if equal(&tenant.key, &shown) {
                Some(tenant)
            } else {
                found
            }
        });
        let Some(tenant) = found else {
            return Err(ApiError::new(
                http::StatusCode::UNAUTHORIZED,
                "authentication_error",
                "invalid_api_key",
                "this key belongs to no tenant; send the one you were given as `Authorization: Bearer`",
            ));
        };
        Ok((
            hex(&hmac(&tenant.secret, client_salt.unwrap_or_default().as_bytes())),
            true,
        ))
    }

    /// Whether there are any.
    pub(crate) fn any(&self) -> bool {
        !self.all.is_empty()
    }
}

/// Compares without telling by its time where two hashes differ.
pub(crate) fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (x, y)| sum | (x ^ y)) == 0
}

fn read(tenant: &TenantConfig, path: &Path) -> Result<Vec<u8>, TenantError> {
    let wrong = |problem: String| TenantError {
        tenant: tenant.name.clone(),
        path: path.to_path_buf(),
        problem,
    };
    let size = std::fs::metadata(path)
        .map_err(|e| wrong(format!("can't be read: {e}")))?
        .len();
    if size > KEY_BYTES_MAX {
        return Err(wrong(format!("has {size} bytes; a key has at most {KEY_BYTES_MAX}")));
    }
    let text = std::fs::read(path).map_err(|e| wrong(format!("can't be read: {e}")))?;
    let trimmed = text.trim_ascii().to_vec();
    if trimmed.is_empty() {
        return Err(wrong("is empty; write the key into it".into()));
    }
    Ok(trimmed)
}

fn hmac(secret: &[u8], text: &[u8]) -> Vec<u8> {
    // HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(text);
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_salts_of_two_tenants_never_meet() {
        let dir = tempfile::tempdir().unwrap();
        let told = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("key-of-{name}\n")).unwrap();
            TenantConfig {
                name: name.into(),
                api_key_file: path,
                secret_file: None,
            }
        };
        let tenants = Tenants::load(&[told("a"), told("b")]).unwrap();
        let ask = |key: &str, salt: Option<&str>| {
            let mut headers = http::HeaderMap::new();
            headers.insert("authorization", format!("Bearer {key}").parse().unwrap());
            tenants.salt(&headers, salt)
        };
        let a = ask("key-of-a", Some("s")).unwrap();
        assert_eq!(a, ask("key-of-a", Some("s")).unwrap());
        assert!(a.1);
        assert_ne!(a, ask("key-of-b", Some("s")).unwrap());
        assert_ne!(a, ask("key-of-a", None).unwrap());
        assert_eq!(ask("key-of-c", None).unwrap_err().code, "invalid_api_key");
        assert_eq!(
            Tenants::default().salt(&http::HeaderMap::new(), Some("s")).unwrap(),
            ("s".into(), false)
        );
    }
}
