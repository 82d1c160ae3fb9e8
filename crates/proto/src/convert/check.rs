//! Bounds of messages that have no domain type of their own.

use super::{WireError, count, limits};
use crate::v1;

/// Checks the counts of a push message; its batches are checked one by one when they are converted.
///
/// # Errors
/// [`WireError::TooMany`] naming the field.
pub fn check_push(push: &v1::PushRequest) -> Result<(), WireError> {
    count("batches", push.batches.len(), limits::PUSH_BATCHES_MAX)?;
    count("renew", push.renew.len(), limits::PUSH_RENEWALS_MAX)
}

/// Checks counts, names and numbers of soft frames before they are kept or relayed.
///
/// # Errors
/// [`WireError`] naming the first field out of bounds.
pub fn check_soft(frames: &v1::SoftFrames) -> Result<(), WireError> {
    count("frames", frames.frames.len(), limits::SOFT_FRAMES_MAX)?;
    for frame in &frames.frames {
        match frame.frame.as_ref().ok_or(WireError::Missing { field: "frame" })? {
            v1::soft_frame::Frame::Load(load) => check_load(load)?,
            v1::soft_frame::Frame::Router(router) => check_router(router)?,
            v1::soft_frame::Frame::Reused(reused) => check_reused(reused)?,
        }
    }
    Ok(())
}

fn short(field: &'static str, value: &str) -> Result<(), WireError> {
    if value.is_empty() {
        return Err(WireError::Missing { field });
    }
    if value.len() > limits::NAME_BYTES_MAX {
        return Err(WireError::TooLong {
            field,
            len: value.len(),
            max: limits::NAME_BYTES_MAX,
        });
    }
    Ok(())
}

/// Checks what an engine is said to have reused, on its way to the agent too.
///
/// # Errors
/// Where it names more blocks than any prompt has.
pub fn check_reused(reused: &v1::Reused) -> Result<(), WireError> {
    count("reused.keys", reused.keys.len(), limits::REUSED_KEYS_MAX)
}

fn check_load(load: &v1::LoadReport) -> Result<(), WireError> {
    short("load.source", &load.source)?;
    if !(0.0..=1.0).contains(&load.kv_usage) {
        let reason = format!("{} isn't a share from 0 to 1", load.kv_usage);
        return Err(WireError::Invalid {
            field: "load.kv_usage",
            reason,
        });
    }
    Ok(())
}

fn check_router(router: &v1::RouterFrame) -> Result<(), WireError> {
    short("router.router", &router.router)?;
    count("router.workers", router.workers.len(), limits::RESERVATIONS_MAX)?;
    count("router.prefixes", router.prefixes.len(), limits::PREFIXES_MAX)?;
    let keys = router.prefixes.iter().map(|prefix| prefix.keys.len()).sum();
    count("router.prefixes.keys", keys, limits::PREFIX_KEYS_MAX)?;
    for prefix in &router.prefixes {
        if prefix.stride == 0 {
            let reason = "0; every how many-th key is named?".to_owned();
            return Err(WireError::Invalid {
                field: "router.prefixes.stride",
                reason,
            });
        }
        if prefix.ttl_ms > limits::PREFIX_TTL_MS_MAX {
            let reason = format!("{} ms and {} are allowed", prefix.ttl_ms, limits::PREFIX_TTL_MS_MAX);
            return Err(WireError::Invalid {
                field: "router.prefixes.ttl_ms",
                reason,
            });
        }
    }
    Ok(())
}
