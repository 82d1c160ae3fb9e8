//! Server-sent events: one chunk for each token, then usage where it was asked for, then `[DONE]`.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use cairn_blocks::Token;
use cairn_replay::engine_model::{FinishReason, Output};
use serde_json::{Value, json};

use super::generate::{Running, finish_reason, transfer_failed};
use super::request::Kind;
use crate::engine::{Faults, Hang};
use crate::http::Cut;

/// A streamed answer. Dropping it takes its requests out of the engine.
pub(crate) struct EventStream {
    running: Running,
    texts: Vec<TextSoFar>,
    ready: VecDeque<Bytes>,
    /// Chunks until the stream is cut, where it will be.
    cut_in: Option<usize>,
    done: bool,
}

/// Turns tokens into text piece by piece. A piece is held back while it ends inside a character.
#[derive(Default)]
struct TextSoFar {
    /// Start of the window that is decoded, and of what in it was not sent yet.
    window: usize,
    sent: usize,
    started: bool,
}

impl EventStream {
    pub(crate) fn new(running: Running) -> Self {
        let cut = Faults::takes_one(&running.engine.faults.cut_streams);
        let mut texts: Vec<TextSoFar> = Vec::new();
        texts.resize_with(running.choices.len(), TextSoFar::default);
        let cut_in = cut.then(|| running.engine.faults.cut_after.load(Ordering::Relaxed));
        Self {
            running,
            texts,
            ready: VecDeque::new(),
            cut_in,
            done: false,
        }
    }

    /// The next chunk.
    pub(crate) fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                if let Some(left) = &mut self.cut_in {
                    if *left == 0 {
                        return Poll::Ready(Some(Err(Cut)));
                    }
                    *left -= 1;
                }
                return Poll::Ready(Some(Ok(chunk)));
            }
            if self.done {
                return Poll::Ready(None);
            }
            if self.running.engine.faults.hang() == Hang::All {
                // Nothing wakes this stream again: its client has to give up, as with a hung process.
                return Poll::Pending;
            }
            match self.running.outputs.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Some(Err(Cut))),
                Poll::Ready(Some((choice, output))) => self.take(choice as usize, output),
            }
        }
    }

    fn take(&mut self, index: usize, output: Output) {
        let last = output.finish.is_some();
        let failed = output
            .finish
            .as_ref()
            .is_some_and(|finish| finish.reason == FinishReason::TransferFailed);
        if failed {
            self.push(&transfer_failed().to_json());
            self.end();
            return;
        }
        if !self.texts[index].started {
            self.texts[index].started = true;
            if self.running.wanted.kind == Kind::Chat {
                self.opening(index);
            }
        }
        let token = self.running.choices[index].note(output);
        if token.is_some() || last {
            self.piece(index, token, last);
        }
        if !last {
            return;
        }
        self.running.open -= 1;
        if self.running.open == 0 {
            if self.running.wanted.include_usage {
                let mut chunk = self.chunk(Vec::new());
                chunk["usage"] = self.running.usage();
                self.push(&chunk);
            }
            self.running.record();
            self.end();
        }
    }

    /// A chat's first chunk: the role.
    fn opening(&mut self, index: usize) {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        let mut chunk = self.chunk(vec![choice]);
        if self.running.wanted.return_token_ids {
            chunk["prompt_token_ids"] = json!(&*self.running.prompts[0]);
        }
        self.push(&chunk);
    }

    fn piece(&mut self, index: usize, token: Option<Token>, last: bool) {
        let mut text = self.text(index, last);
        let wanted = &self.running.wanted;
        let choice = &self.running.choices[index];
        let first = choice.tokens.len() <= 1;
        if wanted.echo && first {
            let prompt = self
                .running
                .engine
                .tokens
                .decode(&self.running.prompts[choice.prompt], true);
            text.insert_str(0, &prompt.unwrap_or_default());
        }
        let reason = finish_reason(choice.finish.as_ref());
        let mut value = match wanted.kind {
            Kind::Chat => json!({
                "index": index, "delta": {"content": text}, "logprobs": null, "finish_reason": reason,
            }),
            Kind::Text => json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason}),
        };
        if last {
            value["stop_reason"] = Value::Null;
        }
        if wanted.return_token_ids {
            value["token_ids"] = json!(token.into_iter().collect::<Vec<_>>());
            if wanted.kind == Kind::Text && first {
                value["prompt_token_ids"] = json!(&*self.running.prompts[choice.prompt]);
            }
        }
        let params = if last { self.running.transfer_params() } else { None };
        let usage = wanted.continuous_usage.then(|| self.running.usage());
        let mut chunk = self.chunk(vec![value]);
        if let Some(params) = params {
            chunk["kv_transfer_params"] = params;
        }
        if let Some(usage) = usage {
            chunk["usage"] = usage;
        }
        self.push(&chunk);
    }

    /// Text that a choice's newest tokens add.
    fn text(&mut self, index: usize, last: bool) -> String {
        let tokens = &self.running.choices[index].tokens;
        let so_far = &mut self.texts[index];
        let decode = |from: usize, to: usize| self.running.engine.tokens.decode(&tokens[from..to], true);
        let before = decode(so_far.window, so_far.sent).unwrap_or_default();
        let now = decode(so_far.window, tokens.len()).unwrap_or_default();
        if !last && now.ends_with('\u{fffd}') {
            return String::new();
        }
        so_far.window = so_far.sent;
        so_far.sent = tokens.len();
        now.strip_prefix(before.as_str()).unwrap_or(&now).to_owned()
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.running.wanted.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Text => "text_completion",
        };
        json!({
            "id": self.running.id,
            "object": object,
            "created": self.running.created,
            "model": self.running.wanted.model,
            "choices": choices,
        })
    }

    fn push(&mut self, value: &Value) {
        let mut line = Vec::with_capacity(256);
        line.extend_from_slice(b"data: ");
        if serde_json::to_writer(&mut line, value).is_err() {
            return;
        }
        line.extend_from_slice(b"\n\n");
        self.ready.push_back(Bytes::from(line));
    }

    fn end(&mut self) {
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
    }
}
