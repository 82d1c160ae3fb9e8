//! Pipes an engine's answer to the client and notices how it ends.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::error::ApiError;
use crate::sse::{SseWatch, Usage, usage_in_tail};
use crate::upstream::{Answer, AnswerCut};

/// How much of a whole answer's end is looked at for its usage; engines write it behind the choices.
const TAIL_BYTES: usize = 64 * 1024;

/// An answer that isn't a stream of events ended early; its connection is closed so that the client notices.
#[derive(Debug, thiserror::Error)]
#[error("the engine's answer ended early")]
pub(crate) struct RelayCut(#[source] AnswerCut);

/// How an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// All of it was passed on.
    Done,
    /// The client went away.
    ClientGone,
    /// The engine's connection broke.
    UpstreamCut,
}

impl Ending {
    /// Label in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::ClientGone => "client_gone",
            Self::UpstreamCut => "upstream_cut",
        }
    }
}

/// Told how an answer goes; dropping it must release what the request holds.
pub(crate) trait Observer: Send + Sync {
    /// It is over; called exactly once.
    fn ended(&mut self, ending: Ending, usage: Option<Usage>);
}

enum Content {
    Events(SseWatch),
    Whole(TailWatch),
}

/// The last frames of an answer, kept without copying.
#[derive(Default)]
struct TailWatch {
    frames: std::collections::VecDeque<Bytes>,
    bytes: usize,
}

impl TailWatch {
    fn push(&mut self, frame: &Bytes) {
        self.bytes += frame.len();
        self.frames.push_back(frame.clone());
        while let Some(first) = self.frames.front()
            && self.bytes - first.len() >= TAIL_BYTES
        {
            self.bytes -= first.len();
            self.frames.pop_front();
        }
    }

    fn usage(&self) -> Option<Usage> {
        match self.frames.len() {
            0 => None,
            1 => usage_in_tail(&self.frames[0]),
            _ => {
                let mut all = Vec::with_capacity(self.bytes);
                for frame in &self.frames {
                    all.extend_from_slice(frame);
                }
                usage_in_tail(&all)
            }
        }
    }
}

/// An answer on its way.
pub(crate) struct Relay {
    first: Option<Bytes>,
    upstream: Option<Answer>,
    content: Content,
    observer: Option<Box<dyn Observer>>,
    /// Length of the whole, where the engine told it and nothing is taken out.
    length: Option<u64>,
    ended: bool,
}

impl Relay {
    /// A relay whose first frame is here already (`first`), for a whole answer or a stream of events.
    pub(crate) fn new(
        first: Option<Bytes>,
        upstream: Answer,
        events: Option<SseWatch>,
        length: Option<u64>,
        observer: Box<dyn Observer>,
    ) -> Self {
        let content = match events {
            Some(watch) => Content::Events(watch),
            None => Content::Whole(TailWatch::default()),
        };
        Self {
            first,
            upstream: Some(upstream),
            content,
            observer: Some(observer),
            length,
            ended: false,
        }
    }

    fn end(&mut self, ending: Ending) {
        self.ended = true;
        self.upstream = None;
        let usage = match &self.content {
            Content::Events(watch) => watch.usage,
            Content::Whole(tail) => tail.usage(),
        };
        if let Some(mut observer) = self.observer.take() {
            observer.ended(ending, usage);
        }
    }

    /// Looks at a frame; what is to be sent on may be empty.
    fn pass(&mut self, data: Bytes) -> Bytes {
        match &mut self.content {
            Content::Events(watch) => watch.push(data),
            Content::Whole(tail) => {
                tail.push(&data);
                data
            }
        }
    }

    fn frame(&mut self, data: Bytes) -> Poll<Option<Result<Frame<Bytes>, RelayCut>>> {
        if let Some(length) = &mut self.length {
            *length = length.saturating_sub(data.len() as u64);
        }
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    /// The stream is over without its end mark: the client gets an error event instead of a silent end.
    fn cut_events(&mut self) -> Poll<Option<Result<Frame<Bytes>, RelayCut>>> {
        self.end(Ending::UpstreamCut);
        let error = ApiError::bad_gateway(
            "upstream_cut",
            "the engine stopped in the middle of the answer; ask again",
        );
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(format!(
            "data: {}\n\n",
            error.json()
        ))))))
    }

    fn over(&mut self) -> Poll<Option<Result<Frame<Bytes>, RelayCut>>> {
        if let Content::Events(watch) = &mut self.content {
            let rest = watch.finish();
            if !watch.done {
                return self.cut_events();
            }
            if !rest.is_empty() {
                self.end(Ending::Done);
                return self.frame(rest);
            }
        }
        self.end(Ending::Done);
        Poll::Ready(None)
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = RelayCut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, RelayCut>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        loop {
            let data = match this.first.take() {
                Some(first) => first,
                None => {
                    let Some(upstream) = this.upstream.as_mut() else {
                        return Poll::Ready(None);
                    };
                    match Pin::new(upstream).poll_frame(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(None) => return this.over(),
                        Poll::Ready(Some(Err(error))) => {
                            if matches!(this.content, Content::Events(_)) {
                                return this.cut_events();
                            }
                            this.end(Ending::UpstreamCut);
                            return Poll::Ready(Some(Err(RelayCut(error))));
                        }
                        Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                            Ok(data) => data,
                            Err(_trailers) => continue,
                        },
                    }
                }
            };
            let out = this.pass(data);
            if !out.is_empty() {
                // A whole answer is over with its last byte; nothing polls the body again after that.
                let last = this.length == Some(out.len() as u64);
                let frame = this.frame(out);
                if last {
                    this.end(Ending::Done);
                }
                return frame;
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Some(length) => SizeHint::with_exact(length),
            None => SizeHint::default(),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Ending::ClientGone);
        }
    }
}
