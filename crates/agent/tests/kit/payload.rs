//! Msgpack values as engines write them.

#![allow(dead_code)]

#[derive(Clone, Debug)]
pub enum Value {
    Nil,
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

pub fn text(s: &str) -> Value {
    Value::Text(s.into())
}

pub fn bytes(b: &[u8]) -> Value {
    Value::Bytes(b.into())
}

/// A tagged map.
pub fn map(fields: &[(&str, Value)]) -> Value {
    Value::Map(fields.iter().map(|(k, v)| (text(k), v.clone())).collect())
}

/// A positional event: its tag, then its fields.
pub fn positional(tag: &str, fields: &[Value]) -> Value {
    Value::Array(std::iter::once(text(tag)).chain(fields.iter().cloned()).collect())
}

pub fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::Nil, |inside, _| Value::Array(vec![inside]))
}

/// `[ts, events, rank]`.
pub fn batch(events: Vec<Value>) -> Vec<u8> {
    batch_at(1.0, events)
}

pub fn batch_at(ts: f64, events: Vec<Value>) -> Vec<u8> {
    pack(&Value::Array(vec![
        Value::Float(ts),
        Value::Array(events),
        Value::Unsigned(0),
    ]))
}

pub fn pack(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, &plain(value)).unwrap();
    out
}

fn plain(value: &Value) -> rmpv::Value {
    match value {
        Value::Nil => rmpv::Value::Nil,
        Value::Unsigned(n) => (*n).into(),
        Value::Signed(n) => (*n).into(),
        Value::Float(f) => (*f).into(),
        Value::Text(s) => s.as_str().into(),
        Value::Bytes(b) => rmpv::Value::Binary(b.clone()),
        Value::Array(list) => rmpv::Value::Array(list.iter().map(plain).collect()),
        Value::Map(pairs) => rmpv::Value::Map(pairs.iter().map(|(k, v)| (plain(k), plain(v))).collect()),
    }
}
