//! Errors as clients of the OpenAI API expect them: `{"error":{"message","type","param","code"}}`.

use http::StatusCode;

use crate::body::{FieldsError, ReadError, ScanError};

/// A refusal or failure that a client is told about. Messages never carry prompts, tokens, keys or salts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// Stable machine-readable cause.
    pub code: &'static str,
    /// Which member is at fault.
    pub param: Option<&'static str>,
    /// What is wrong and what to do.
    pub message: String,
    /// Seconds after which a retry may work.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// A fault of the request.
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
    }

    /// Any error.
    pub(crate) fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// Names the member at fault.
    pub(crate) fn at(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    /// Adds `Retry-After`.
    pub(crate) fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// No engine can take the request now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", code, message).retry_after(1)
    }

    /// The engines that were asked failed.
    pub(crate) fn bad_gateway(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "upstream_error", code, message)
    }

    /// The JSON body.
    pub(crate) fn json(&self) -> String {
        serde_json::json!({
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        })
        .to_string()
    }
}

impl From<ScanError> for ApiError {
    fn from(error: ScanError) -> Self {
        let code = match &error {
            ScanError::Utf8 { .. } => "invalid_utf8",
            ScanError::LoneSurrogate { .. } => "lone_surrogate",
            ScanError::Malformed { .. }
            | ScanError::Truncated { .. }
            | ScanError::TooDeep { .. }
            | ScanError::TooManyMembers { .. } => "invalid_json",
        };
        Self::invalid(code, error.to_string())
    }
}

impl From<FieldsError> for ApiError {
    fn from(error: FieldsError) -> Self {
        let message = error.to_string();
        Self::invalid("invalid_value", message).at(error.param)
    }
}

impl From<ReadError> for ApiError {
    fn from(error: ReadError) -> Self {
        let (status, code) = match &error {
            ReadError::TooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            ReadError::Timeout { .. } => (StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            ReadError::Cut(_) => (StatusCode::BAD_REQUEST, "body_cut"),
        };
        Self::new(status, "invalid_request_error", code, error.to_string())
    }
}
