//! A compiled chat template in an environment that behaves like the one of Python's `transformers`.

mod choose;
mod json;
mod plan;
mod python;
mod time;

pub(crate) use choose::Templates;

use crate::error::ChatError;
use crate::few::mapping;
use crate::format::{self, ContentFormat};
use crate::options::WallClock;
use minijinja::machinery;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use plan::{Conditions, Plans};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Chat templates in use have 0.3-15 KiB; a longer one is refused before it is parsed.
const TEMPLATE_BYTES_MAX: usize = 256 << 10;

/// The one template's name inside its environment; it has no extension, so nothing is HTML-escaped.
const NAME: &str = "chat";

/// A template ready to render.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    /// What its content loops say.
    pub format: ContentFormat,
    /// Whether it names the developer role itself.
    pub knows_developer: bool,
    /// Variables it reads; other keyword arguments never reach it.
    variables: HashSet<String>,
    source: Arc<str>,
    /// What is known of its renderings.
    plans: Plans,
}

impl Template {
    /// Compiles a template.
    ///
    /// # Errors
    /// The parser's reason, with its line.
    pub fn compile(source: &str, fuel: u64, clock: &WallClock) -> Result<Self, String> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(format!(
                "it has {} bytes, more than the limit of {TEMPLATE_BYTES_MAX}",
                source.len()
            ));
        }
        let prepared = prepare(source);
        let syntax = syntax().map_err(|e| e.to_string())?;
        let tree = machinery::parse(&prepared, NAME, syntax.clone()).map_err(|e| e.to_string())?;
        let format = format::detect(&tree);
        drop(tree);
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_debug(false);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(fuel));
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        let clock = clock.clone();
        environment.add_function("strftime_now", move |format: &str| time::strftime(format, &(clock.0)()));
        python::install(&mut environment);
        environment
            .add_template_owned(NAME, prepared)
            .map_err(|e| e.to_string())?;
        let variables = environment
            .get_template(NAME)
            .map_err(|e| e.to_string())?
            .undeclared_variables(false);
        Ok(Self {
            environment,
            format,
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
            variables,
            source: source.into(),
            plans: Plans::default(),
        })
    }

    /// Whether the template reads this variable.
    pub fn reads(&self, variable: &str) -> bool {
        self.variables.contains(variable)
    }

    /// Whether the template's text holds this word.
    pub fn mentions(&self, word: &str) -> bool {
        self.source.contains(word)
    }

    /// Renders with the given variables.
    pub fn render(&self, variables: &[(&str, Value)]) -> Result<String, ChatError> {
        let context = mapping(variables.iter().cloned());
        let template = self.environment.get_template(NAME).map_err(|e| refused(&e))?;
        template.render(context).map_err(|e| refused(&e))
    }

    /// Under which conditions conversations of `roles` are rendered from pieces; `None` where they aren't.
    fn follow(&self, roles: &BTreeSet<&str>, format: ContentFormat, variables: &[(&str, Value)]) -> Option<Conditions> {
        let template = self.environment.get_template(NAME).ok()?;
        let tree = machinery::parse(template.source(), NAME, syntax().ok()?).ok()?;
        plan::follow(&tree, roles, format, variables).ok()
    }
}

/// Tags' lines leave no blank lines, as `transformers` sets it.
fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// A render error as a client may see it: the template's own words where it raised them, else the kind and line.
/// The values at fault stay out of it.
fn refused(error: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(at) = cause {
        if let Some(raised) = at.downcast_ref::<Raised>() {
            return ChatError::Template {
                reason: raised.0.clone(),
            };
        }
        cause = at.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::TooMuchWork;
    }
    let line = error
        .line()
        .map(|line| format!(" in line {line} of the template"))
        .unwrap_or_default();
    ChatError::Template {
        reason: format!("{}{line}", error.kind()),
    }
}

/// What `raise_exception` throws.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: Value) -> Result<Value, Error> {
    /// A template's message may quote the request at length.
    const MESSAGE_CHARS_MAX: usize = 1_000;
    let message: String = message.to_string().chars().take(MESSAGE_CHARS_MAX).collect();
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
}

/// Normalises newlines as Jinja does and turns `generation` blocks, which only mark a region for training, into
/// scopes of their own.
fn prepare(source: &str) -> String {
    let unix = if source.contains('\r') {
        source.replace("\r\n", "\n").replace('\r', "\n")
    } else {
        source.to_owned()
    };
    let mut out = String::with_capacity(unix.len());
    let mut rest = unix.as_str();
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        match generation_tag(tag) {
            Some((replacement, length)) => {
                out.push_str(&replacement);
                rest = &tag[length..];
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// Reads `{%- generation -%}` or its end at the head of `tag`: what to write for it, and its length.
fn generation_tag(tag: &str) -> Option<(String, usize)> {
    let end = tag.find("%}")? + 2;
    let inner = &tag[2..end - 2];
    let open = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
    let inner = &inner[open.len()..];
    let close = if inner.ends_with(['-', '+']) {
        &inner[inner.len() - 1..]
    } else {
        ""
    };
    let word = match inner[..inner.len() - close.len()].trim() {
        "generation" => "with",
        "endgeneration" => "endwith",
        _ => return None,
    };
    Some((format!("{{%{open} {word} {close}%}}"), end))
}
