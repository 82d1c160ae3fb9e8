//! Request bodies: bounded reading, one validating scan, the fields a decision needs, and edits by splicing.

mod edit;
mod fields;
mod read;
mod scan;

pub(crate) use edit::{EditPlan, edit};
pub(crate) use fields::{Endpoint, Fields, FieldsError, PromptInput};
pub(crate) use read::{BodyGate, BodyLimits, ReadError};
pub(crate) use scan::{ScanError, ScannedBody};
