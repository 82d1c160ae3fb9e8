//! Where connections lead to.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use http::HeaderValue;
use http::uri::{Authority, Scheme};

/// Scheme, host and port of an engine, with what each request there says of them; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Origin(Arc<Place>);

#[derive(Debug)]
struct Place {
    scheme: Scheme,
    authority: Authority,
    host: HeaderValue,
    /// Of host and port; every request looks its engine's connections up twice.
    hash: u64,
}

impl Origin {
    /// `None` where the host can't be said in a header.
    pub(crate) fn new(scheme: Scheme, authority: Authority) -> Option<Self> {
        let usual = match authority.port_u16() {
            Some(80) => scheme == Scheme::HTTP,
            Some(443) => scheme == Scheme::HTTPS,
            Some(_) | None => false,
        };
        let host = if usual { authority.host() } else { authority.as_str() };
        let host = HeaderValue::from_str(host).ok()?;
        let mut hasher = DefaultHasher::new();
        authority.as_str().hash(&mut hasher);
        Some(Self(Arc::new(Place {
            scheme,
            authority,
            host,
            hash: hasher.finish(),
        })))
    }

    /// `http` or `https`.
    pub(super) fn scheme(&self) -> &Scheme {
        &self.0.scheme
    }

    /// Host and port.
    pub(super) fn authority(&self) -> &Authority {
        &self.0.authority
    }

    /// The `host` header of requests there.
    pub(super) fn host(&self) -> &HeaderValue {
        &self.0.host
    }
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.0, &other.0);
        Arc::ptr_eq(a, b) || a.scheme == b.scheme && a.authority.as_str() == b.authority.as_str()
    }
}

impl Eq for Origin {}

impl Hash for Origin {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

/// Things by origin, whose hash is made already.
pub(super) type ByOrigin<T> = HashMap<Origin, T, BuildHasherDefault<Made>>;

/// Takes a hash as it is.
#[derive(Default)]
pub(super) struct Made(u64);

impl Hasher for Made {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}
