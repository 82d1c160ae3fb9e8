//! Request bodies: bounded reading, one validating scan, the fields a decision needs, and edits by splicing.

mod edit;
mod fields;
mod read;
mod scan;
mod turns;

pub(crate) use edit::{EditPlan, edit};
pub(crate) use fields::{Chat, Endpoint, Fields, FieldsError, PromptInput};
pub(crate) use read::{BodyGate, BodyLimits, ReadError};
pub(crate) use scan::{Member, ScanError, ScannedBody};
pub(crate) use turns::Turns;
