//! Typed reading of a JSON body, with errors that name the field.

use serde_json::{Map, Value};

use crate::http::ApiError;

/// A body's object.
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

/// Parses a body that has to be an object.
pub(crate) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if body.is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::bad("the body has to be a JSON object")),
        Err(error) => Err(ApiError::bad(format!(
            "the body is not valid JSON at line {} column {}",
            error.line(),
            error.column()
        ))),
    }
}

impl<'a> Fields<'a> {
    /// A field that is present and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&self, name: &'static str) -> Result<Option<&'a str>, ApiError> {
        self.get(name)
            .map(|value| value.as_str().ok_or_else(|| ApiError::field(name, "give a string")))
            .transpose()
    }

    pub(crate) fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        self.get(name).map_or(Ok(false), |value| {
            value
                .as_bool()
                .ok_or_else(|| ApiError::field(name, "give true or false"))
        })
    }

    /// A whole number within a range.
    pub(crate) fn number(&self, name: &'static str, low: u32, high: u32) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value
            .as_i64()
            .filter(|n| (i64::from(low)..=i64::from(high)).contains(n));
        match number.and_then(|n| u32::try_from(n).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::field(
                name,
                format!("give a whole number from {low} to {high}"),
            )),
        }
    }

    pub(crate) fn object(&self, name: &'static str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name)
            .map(|value| {
                value
                    .as_object()
                    .map(Fields)
                    .ok_or_else(|| ApiError::field(name, "give an object"))
            })
            .transpose()
    }
}
