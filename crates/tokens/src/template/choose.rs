//! Chooses the template for a request, gathers its variables and renders.

use super::Template;
use super::plan::Found;
use crate::error::{ChatError, LoadError};
use crate::files::Files;
use crate::format::ContentFormat;
use crate::media;
use crate::messages::{Content, Conversation, PartKind, changes_in_plain, to_jinja, tools_to_jinja};
use crate::model::Rendered;
use crate::options::{ContentFormatOption, LoadOptions};
use crate::request::{ChatRequest, PlainMessage, invalid};
use minijinja::Value as Jinja;
use parking_lot::Mutex;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Compiled templates of requests kept at a time; a client uses one or two.
const REQUEST_TEMPLATES_MAX: usize = 16;

/// Appended to the message that is to be continued, to find its end again; ends in a space to see whether the
/// template trimmed it.
const CONTINUE_MARK: &str = "\u{10FFFD}\u{F8FFE}continue\u{F8FFE}\u{10FFFD} ";

/// Arguments of Python's rendering call that never reach the template.
const CALL_ARGUMENTS: [&str; 11] = [
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
    "add_generation_prompt",
];

/// A model's templates.
#[derive(Debug)]
pub(crate) struct Templates {
    /// By name; one that doesn't compile keeps its reason until a request needs it.
    own: BTreeMap<String, Result<Arc<Template>, String>>,
    /// The operator's, which replaces them.
    configured: Option<Arc<Template>>,
    of_requests: Mutex<VecDeque<(String, Arc<Template>)>>,
    special: Vec<(String, String)>,
    options: LoadOptions,
}

impl Templates {
    /// Compiles the model's templates.
    pub fn new(files: &Files, options: LoadOptions) -> Result<Self, LoadError> {
        let compile = |source: &str| Template::compile(source, options.template_fuel, &options.clock);
        let own = files
            .templates
            .iter()
            .map(|(name, source)| (name.clone(), compile(source).map(Arc::new)))
            .collect();
        let configured = match &options.chat_template {
            None => None,
            Some(source) => Some(Arc::new(compile(source).map_err(|reason| LoadError::Template {
                name: "--chat-template".to_owned(),
                reason,
            })?)),
        };
        Ok(Self {
            own,
            configured,
            of_requests: Mutex::default(),
            special: files.named.clone(),
            options,
        })
    }

    /// Renders a request.
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<Rendered, ChatError> {
        if request.continue_final_message && request.add_generation_prompt {
            let reason = "can't be combined with add_generation_prompt, which is true unless set to false";
            return Err(invalid("continue_final_message", reason));
        }
        let tools = request
            .tools
            .filter(|_| !(request.tool_choice_none && self.options.exclude_tools_when_tool_choice_none));
        let template = self.choose(request, tools.is_some())?;
        let format = self.format(&template);
        let mut conversation = Conversation::read(request.messages, format)?;
        if !template.knows_developer {
            conversation.developer_to_system();
        }
        let mut variables = self.variables(request, tools, &template)?;
        let at = variables.len();
        variables.push(("messages", Jinja::from(())));
        let continued = match request.continue_final_message {
            true => Some(leave_open(&mut conversation, &template)?),
            false => None,
        };
        let mut render = |conversation: &Conversation<'_>| -> Result<String, ChatError> {
            variables[at].1 = conversation.to_jinja();
            let text = template.render(&variables)?;
            match &continued {
                Some(last) => cut_open(text, last),
                None => Ok(text),
            }
        };
        let text = render(&conversation)?;
        let known_bytes = match (conversation.has_media, format) {
            (false, _) => None,
            (true, ContentFormat::String) => Some(media::before_mark(&text)),
            (true, ContentFormat::OpenAi) => Some(media::known_prefix(&text, &render(&conversation.with_marks())?)),
        };
        Ok(Rendered { text, known_bytes })
    }

    /// Renders a conversation of nothing but roles and texts, with every option at its default.
    pub fn render_plain(&self, messages: &[PlainMessage<'_>]) -> Result<String, ChatError> {
        let request = ChatRequest {
            add_generation_prompt: true,
            ..ChatRequest::default()
        };
        let template = self.choose(&request, false)?;
        let found = self.planned(&template, messages);
        if let Found::Text(text) = found {
            return Ok(text);
        }
        let format = self.format(&template);
        let given = self.variables(&request, None, &template)?;
        let render = |messages: &[PlainMessage<'_>]| {
            let mut conversation = Conversation::plain(messages, format)?;
            if !template.knows_developer {
                conversation.developer_to_system();
            }
            let mut variables = given.clone();
            variables.push(("messages", conversation.to_jinja()));
            template.render(&variables)
        };
        let text = render(messages)?;
        if matches!(found, Found::New) {
            let follow = |roles: &BTreeSet<&str>| template.follow(roles, format, &given);
            template
                .plans
                .learn(messages, &text, follow, |marked| render(marked).ok());
        }
        Ok(text)
    }

    /// Whether this conversation is put together from pieces that are ready.
    pub fn renders_from_pieces(&self, messages: &[PlainMessage<'_>]) -> bool {
        let template = self.choose(&ChatRequest::default(), false);
        template.is_ok_and(|template| matches!(self.planned(&template, messages), Found::Text(_)))
    }

    fn planned(&self, template: &Template, messages: &[PlainMessage<'_>]) -> Found {
        match messages.iter().any(changes_in_plain) {
            false => template.plans.render(messages),
            true => Found::Unfit,
        }
    }

    fn format(&self, template: &Template) -> ContentFormat {
        match self.options.content_format {
            ContentFormatOption::Auto => template.format,
            ContentFormatOption::Fixed(format) => format,
        }
    }

    fn choose(&self, request: &ChatRequest<'_>, tools: bool) -> Result<Arc<Template>, ChatError> {
        let in_kwargs = request
            .chat_template_kwargs
            .and_then(|k| k.get("chat_template"))
            .filter(|v| !v.is_null());
        let sent = request.chat_template.or_else(|| in_kwargs.and_then(Json::as_str));
        if (request.chat_template.is_some() || in_kwargs.is_some()) && !self.options.trust_request_chat_template {
            return Err(ChatError::RequestTemplateRefused);
        }
        match sent.filter(|s| !s.is_empty()) {
            Some(source) => self.of_request(source),
            None => match &self.configured {
                Some(template) => Ok(Arc::clone(template)),
                None => {
                    let tool_use = self.own.get("tool_use").filter(|_| tools && self.own.len() > 1);
                    let found = tool_use.or_else(|| self.own.get("default"));
                    compiled(found.ok_or(ChatError::NoTemplate)?)
                }
            },
        }
    }

    /// A template that the request brings, or names.
    fn of_request(&self, source: &str) -> Result<Arc<Template>, ChatError> {
        if let Some(named) = self.own.get(source).filter(|_| self.own.len() > 1) {
            return compiled(named);
        }
        let mut kept = self.of_requests.lock();
        if let Some((_, template)) = kept.iter().find(|(known, _)| known == source) {
            return Ok(Arc::clone(template));
        }
        let template = Template::compile(source, self.options.template_fuel, &self.options.clock)
            .map_err(|reason| ChatError::Template { reason })?;
        let template = Arc::new(template);
        kept.truncate(REQUEST_TEMPLATES_MAX - 1);
        kept.push_front((source.to_owned(), Arc::clone(&template)));
        Ok(template)
    }

    /// Everything but the messages, later entries winning.
    fn variables<'r>(
        &'r self,
        request: &ChatRequest<'r>,
        tools: Option<&[Json]>,
        template: &Template,
    ) -> Result<Vec<(&'r str, Jinja)>, ChatError> {
        let mut out: Vec<(&str, Jinja)> = vec![("tools", Jinja::from(())), ("documents", Jinja::from(()))];
        out.extend(
            self.special
                .iter()
                .map(|(name, token)| (name.as_str(), Jinja::from(token.as_str()))),
        );
        keep(&mut out, &self.options.default_chat_template_kwargs, template)?;
        if let Some(tools) = tools {
            out.push(("tools", tools_to_jinja(tools)?));
        }
        let thinking = request
            .chat_template_kwargs
            .is_some_and(|k| k.contains_key("enable_thinking"));
        if let Some(kwargs) = request.chat_template_kwargs {
            keep(&mut out, kwargs, template)?;
        }
        if let Some(documents) = request.documents {
            out.push(("documents", to_jinja(documents)));
        }
        if let Some(effort) = request.reasoning_effort {
            out.push(("reasoning_effort", Jinja::from(effort)));
            if !thinking {
                out.push(("enable_thinking", Jinja::from(effort != "none")));
            }
        }
        out.push(("add_generation_prompt", Jinja::from(request.add_generation_prompt)));
        Ok(out)
    }
}

/// Adds keyword arguments as the engine passes them on.
fn keep<'r>(
    out: &mut Vec<(&'r str, Jinja)>,
    kwargs: &'r serde_json::Map<String, Json>,
    template: &Template,
) -> Result<(), ChatError> {
    for (name, value) in kwargs {
        // The engine takes these two values for "not given".
        if value.is_null() || value == "auto" || CALL_ARGUMENTS.contains(&name.as_str()) {
            continue;
        }
        if (name == "messages" && template.reads("messages")) || name == "conversation" {
            return Err(invalid("chat_template_kwargs", "can't replace the messages"));
        }
        out.push((name, to_jinja(value)));
    }
    Ok(())
}

fn compiled(template: &Result<Arc<Template>, String>) -> Result<Arc<Template>, ChatError> {
    template.clone().map_err(|reason| ChatError::Template { reason })
}

/// Marks the end of the last message's text, and returns that text.
fn leave_open(conversation: &mut Conversation<'_>, template: &Template) -> Result<String, ChatError> {
    let refuse = |reason: &str| Err(invalid("continue_final_message", reason));
    if !template.mentions("content") {
        return refuse("this model's template has no content to continue");
    }
    let Some(last) = conversation.messages.last_mut() else {
        return refuse("there is no message to continue");
    };
    let open = |text: &mut std::borrow::Cow<'_, str>| {
        let before = text.to_string();
        *text = format!("{before}{CONTINUE_MARK}").into();
        before
    };
    match &mut last.content {
        Content::Text(text) => Ok(open(text)),
        Content::Parts(parts) => {
            let text = parts.iter_mut().rev().find_map(|part| match &mut part.kind {
                PartKind::Text(text) => Some(open(text)),
                PartKind::Media(_) | PartKind::ToolReference(_) => None,
            });
            text.map_or_else(|| refuse("the last message has no text to continue"), Ok)
        }
    }
}

/// Cuts a rendering behind the text that is to be continued.
fn cut_open(mut text: String, last: &str) -> Result<String, ChatError> {
    let mark = CONTINUE_MARK.trim_end();
    let at = text.rfind(mark).filter(|_| text.contains(last.trim()));
    let Some(at) = at else {
        return Err(invalid(
            "continue_final_message",
            "the chat template drops or changes the last message",
        ));
    };
    let kept = text[at..].starts_with(CONTINUE_MARK);
    text.truncate(at);
    if !kept {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}
