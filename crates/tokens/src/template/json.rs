//! `tojson` as `transformers` defines it: Python's `json.dumps`, without HTML escapes.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::Write;

/// Python's own limit is its recursion limit; no schema comes near this.
const DEPTH_MAX: usize = 128;

/// The filter: `x | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(state: &State, value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let ensure_ascii = match indent.filter(|v| !v.is_undefined()) {
        // The first positional argument after the value is ensure_ascii.
        Some(v) => v.is_true(),
        None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match kwargs
        .get::<Option<Value>>("indent")?
        .filter(|v| !v.is_none() && !v.is_undefined())
    {
        None => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(
                usize::try_from(v)
                    .map_err(|_| bad("indent must be a small number"))?
                    .min(64),
            ),
        }),
    };
    let (item, key) = match kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        Some(pair) => (
            pair.get_item_by_index(0)?.to_string(),
            pair.get_item_by_index(1)?.to_string(),
        ),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii,
        indent,
        item,
        key,
        sort_keys,
        state,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a, 't, 'e> {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    state: &'a State<'t, 'e>,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(bad("nested too deeply for tojson"));
        }
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => {
                let text = value.as_str().ok_or_else(|| bad("not a string"))?;
                self.state.consume_fuel((text.len() / 64) as u64)?;
                self.string(text);
            }
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.object(value, depth)?,
            ValueKind::Undefined => return Err(bad("an undefined value is not JSON serializable")),
            ValueKind::Bytes | ValueKind::Plain | ValueKind::Invalid => {
                return Err(bad("a value is not JSON serializable"));
            }
            _ => return Err(bad("a value is not JSON serializable")),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.separate(&mut empty, depth);
            self.value(&item, depth + 1)?;
        }
        self.close(']', empty, depth);
        Ok(())
    }

    fn object(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('{');
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let mut empty = true;
        for name in keys {
            self.separate(&mut empty, depth);
            match name.as_str() {
                Some(text) => self.string(text),
                None => {
                    let text = match name.kind() {
                        ValueKind::None => "null".to_owned(),
                        ValueKind::Bool => if name.is_true() { "true" } else { "false" }.to_owned(),
                        ValueKind::Number => number(&name),
                        _ => return Err(bad("keys must be strings, numbers, booleans or none")),
                    };
                    self.string(&text);
                }
            }
            self.out.push_str(&self.key);
            self.value(&value.get_item(&name)?, depth + 1)?;
        }
        self.close('}', empty, depth);
        Ok(())
    }

    fn separate(&mut self, empty: &mut bool, depth: usize) {
        if !*empty {
            self.out.push_str(&self.item);
        }
        *empty = false;
        self.line(depth + 1);
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A number as `json.dumps` and `repr` print it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        value.to_string()
    } else {
        f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
    }
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let text = format!("{x:e}");
    let Some((mantissa, exponent)) = text.split_once('e') else {
        return text;
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let text = x.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

fn bad(reason: &'static str) -> Error {
    Error::new(ErrorKind::BadSerialization, reason)
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_print_as_python_prints_them() {
        let check = |x: f64, expect: &str| assert_eq!(float(x), expect);
        check(1.0, "1.0");
        check(0.1, "0.1");
        check(-0.0, "-0.0");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(1.5e300, "1.5e+300");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(123456.789, "123456.789");
    }
}
