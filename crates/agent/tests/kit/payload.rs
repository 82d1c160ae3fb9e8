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
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Nil => rmp::encode::write_nil(out).unwrap(),
        Value::Unsigned(n) => drop(rmp::encode::write_uint(out, *n).unwrap()),
        Value::Signed(n) => drop(rmp::encode::write_sint(out, *n).unwrap()),
        Value::Float(f) => rmp::encode::write_f64(out, *f).unwrap(),
        Value::Text(s) => rmp::encode::write_str(out, s).unwrap(),
        Value::Bytes(b) => rmp::encode::write_bin(out, b).unwrap(),
        Value::Array(list) => {
            rmp::encode::write_array_len(out, list.len() as u32).unwrap();
            list.iter().for_each(|v| write(v, out));
        }
        Value::Map(pairs) => {
            rmp::encode::write_map_len(out, pairs.len() as u32).unwrap();
            for (key, value) in pairs {
                write(key, out);
                write(value, out);
            }
        }
    }
}
