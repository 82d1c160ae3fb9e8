//! Request bodies: bounded reading, one validating scan, the fields a decision needs, and edits by splicing.

mod edit;
mod fields;
mod read;
mod scan;

pub(crate) use edit::{EditPlan, Edited, edit};
pub(crate) use fields::{ChatFields, Endpoint, Fields, FieldsError, PromptInput};
pub(crate) use read::{BodyGate, BodyLimits, HeldBody, ReadError};
pub(crate) use scan::{Member, ScanError, members};
