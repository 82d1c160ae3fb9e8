//! Python's methods, tests and number formatting where templates rely on them and the engine's differ.

use super::json;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Adds what Jinja under Python has and the template engine lacks or does otherwise.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        // Nothing is escaped, so a text is written as it is: nearly all that templates write.
        if let Some(text) = value.as_str() {
            return out
                .write_str(text)
                .map_err(|_| Error::new(ErrorKind::WriteFailure, "writing a text"));
        }
        if value.kind() == ValueKind::Number && !value.is_integer() {
            let text = json::number(value);
            return out
                .write_str(&text)
                .map_err(|_| Error::new(ErrorKind::WriteFailure, "writing a number"));
        }
        minijinja::escape_formatter(out, state, value)
    });
    environment.add_filter("trim", |text: &Value, chars: Option<&str>| -> Value {
        Value::from(strip(&text.to_string(), chars, Ends::BOTH))
    });
    environment.add_filter("int", |v: &Value, default: Option<Value>| -> Value {
        int(v).unwrap_or(default.unwrap_or(0.into()))
    });
    environment.add_filter("float", |v: &Value, default: Option<Value>| -> Value {
        let number = v
            .as_str()
            .map_or_else(|| f64::try_from(v.clone()).ok(), |text| text.trim().parse().ok());
        number.map_or_else(|| default.unwrap_or(0.0.into()), Value::from)
    });
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("truncate", minijinja_contrib::filters::truncate);
    environment.add_filter("striptags", minijinja_contrib::filters::striptags);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| {
        minijinja_contrib::globals::cycler(items.to_vec())
    });
    environment.add_test("sequence", |v: &Value| {
        matches!(
            v.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
        )
    });
    environment.add_test("iterable", |v: &Value| {
        v.kind() != ValueKind::None && (v.as_str().is_some() || v.try_iter().is_ok())
    });
    environment.add_test("number", |v: &Value| {
        matches!(v.kind(), ValueKind::Number | ValueKind::Bool)
    });
    environment.add_test("integer", |v: &Value| v.is_integer());
    environment.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);
}

/// Jinja's `int`: what can't be read as a number is the default.
fn int(value: &Value) -> Option<Value> {
    let text = match value.as_str() {
        Some(text) => text.trim(),
        None if value.is_integer() => return Some(value.clone()),
        None if value.kind() == ValueKind::Bool => return Some(Value::from(i64::from(value.is_true()))),
        None => return whole(f64::try_from(value.clone()).ok()?),
    };
    let digits = text.replace('_', "");
    digits
        .parse::<i64>()
        .map(Value::from)
        .ok()
        .or_else(|| whole(text.parse().ok()?))
}

fn whole(number: f64) -> Option<Value> {
    /// Doubles count every integer up to here.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    (number.abs() <= EXACT_MAX).then(|| Value::from(number as i64))
}

/// `x | default(value, boolean)`, both by position or name.
fn default(value: &Value, other: Option<Value>, boolean: Option<bool>, kwargs: Kwargs) -> Result<Value, Error> {
    let other = match other {
        Some(other) => other,
        None => kwargs
            .get::<Option<Value>>("default_value")?
            .unwrap_or_else(|| Value::from("")),
    };
    let boolean = boolean.or(kwargs.get::<Option<bool>>("boolean")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let missing = value.is_undefined() || (boolean && !value.is_true());
    Ok(if missing { other } else { value.clone() })
}

/// Python's `str.title`: a letter after anything but a letter is upper case, every other letter lower.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Python's `str.isspace`: Unicode white space and the four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[derive(Clone, Copy)]
struct Ends {
    start: bool,
    end: bool,
}

impl Ends {
    const BOTH: Self = Self { start: true, end: true };
}

fn strip<'a>(text: &'a str, chars: Option<&str>, ends: Ends) -> &'a str {
    let gone = |c: char| chars.map_or_else(|| is_space(c), |set| set.contains(c));
    let text = if ends.start {
        text.trim_start_matches(gone)
    } else {
        text
    };
    if ends.end { text.trim_end_matches(gone) } else { text }
}

fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let ours = match value.kind() {
        ValueKind::String => string_method(state, value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Map => map_method(value, name, args)?,
        ValueKind::Seq => list_method(value, name, args)?,
        _ => None,
    };
    match ours {
        Some(found) => Ok(found),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn string_method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    state.consume_fuel((text.len() / 64) as u64)?;
    Ok(Some(match name {
        "strip" => Value::from(strip(text, optional(args)?, Ends::BOTH)),
        "lstrip" => Value::from(strip(
            text,
            optional(args)?,
            Ends {
                start: true,
                end: false,
            },
        )),
        "rstrip" => Value::from(strip(
            text,
            optional(args)?,
            Ends {
                start: false,
                end: true,
            },
        )),
        "removeprefix" => Value::from(text.strip_prefix(one(args)?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(one(args)?).unwrap_or(text)),
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "title" => Value::from(title(text)),
        "casefold" => Value::from(text.to_lowercase()),
        "split" => split(text, args, false)?,
        "rsplit" => split(text, args, true)?,
        "partition" | "rpartition" => {
            let sep = non_empty(one(args)?)?;
            let cut = if name == "partition" {
                text.split_once(sep)
            } else {
                text.rsplit_once(sep)
            };
            let parts = match (cut, name) {
                (Some((a, b)), _) => [a, sep, b],
                (None, "partition") => [text, "", ""],
                (None, _) => ["", "", text],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "index" | "rindex" => {
            let what = one(args)?;
            let at = if name == "index" {
                text.find(what)
            } else {
                text.rfind(what)
            };
            let at = at.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "splitlines" => {
            let keep = from_args::<(Option<bool>, Kwargs)>(args)
                .and_then(|(keep, kwargs)| Ok(keep.or(kwargs.get::<Option<bool>>("keepends")?)))?;
            split_lines(text, keep.unwrap_or(false))
        }
        "zfill" | "ljust" | "rjust" | "center" => pad(state, text, name, args)?,
        _ => return Ok(None),
    }))
}

fn one(args: &[Value]) -> Result<&str, Error> {
    from_args::<(&str,)>(args).map(|(text,)| text)
}

fn optional(args: &[Value]) -> Result<Option<&str>, Error> {
    from_args::<(Option<&str>,)>(args).map(|(text,)| text)
}

fn non_empty(sep: &str) -> Result<&str, Error> {
    if sep.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(sep)
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (sep, max, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = match sep.filter(|v| !v.is_undefined()) {
        Some(sep) => Some(sep),
        None => kwargs.get::<Option<Value>>("sep")?,
    };
    let max = max.or(kwargs.get::<Option<i64>>("maxsplit")?).unwrap_or(-1);
    kwargs.assert_all_used()?;
    let limit = usize::try_from(max).map_or(usize::MAX, |m| m.saturating_add(1));
    let parts: Vec<&str> = match sep.as_ref().and_then(|v| v.as_str()) {
        Some(sep) => {
            let sep = non_empty(sep)?;
            if from_right {
                let mut parts: Vec<&str> = text.rsplitn(limit, sep).collect();
                parts.reverse();
                parts
            } else {
                text.splitn(limit, sep).collect()
            }
        }
        None if from_right => words_from_right(text, limit),
        None => words(text, limit),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits on runs of white space; the last part keeps what is left when the limit is reached.
fn words(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() + 1 >= limit {
            parts.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    parts
}

fn words_from_right(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if parts.len() + 1 >= limit {
            parts.push(rest);
            break;
        }
        let start = rest
            .char_indices()
            .rev()
            .find(|(_, c)| is_space(*c))
            .map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

fn split_lines(text: &str, keep_ends: bool) -> Value {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let mut end = at + rest[at..].chars().next().map_or(0, char::len_utf8);
        if rest[at..].starts_with("\r\n") {
            end = at + 2;
        }
        lines.push(Value::from(if keep_ends { &rest[..end] } else { &rest[..at] }));
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines.into()
}

fn pad(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (u32, Option<char>) = from_args(args)?;
    let width = width as usize;
    state.consume_fuel((width / 64) as u64)?;
    let missing = width.saturating_sub(text.chars().count());
    let c = if name == "zfill" { '0' } else { fill.unwrap_or(' ') };
    let repeated = |n: usize| c.to_string().repeat(n);
    Ok(Value::from(match name {
        "ljust" => format!("{text}{}", repeated(missing)),
        "rjust" => format!("{}{text}", repeated(missing)),
        "zfill" => match text.strip_prefix(['-', '+']) {
            Some(digits) => format!("{}{}{digits}", &text[..1], repeated(missing)),
            None => format!("{}{text}", repeated(missing)),
        },
        _ => {
            // Python puts the odd space left where both the gap and the width are odd.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", repeated(left), repeated(missing - left))
        }
    }))
}

fn map_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if name != "copy" {
        return Ok(None);
    }
    let () = from_args(args)?;
    Ok(Some(value.clone()))
}

fn list_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *what);
            let at = found.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "value is not in list"))?;
            Ok(Some(Value::from(at)))
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}
