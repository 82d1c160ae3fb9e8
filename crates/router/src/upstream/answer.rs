//! An engine's answer: its body drives the connection that it comes over, and gives that back at its end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::connection::Connection;
use super::kept::Kept;
use super::origin::Origin;

/// An answer that ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerCut {
    /// As the connection says.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
    /// The connection is over, and the answer isn't.
    #[error("the connection ended before the answer")]
    Over,
}

/// What a body brings next; `None` at its end.
type Part = Option<Result<Frame<Bytes>, hyper::Error>>;

/// The body of an answer; dropping it before its end closes the connection, which cancels the request.
pub(crate) struct Answer {
    body: Incoming,
    /// `None` once it is given back or over; boxed, since answers move through many hands.
    way: Option<Box<Way>>,
}

/// What an answer comes over, and where that goes afterwards.
struct Way {
    connection: Connection,
    home: Arc<Kept>,
    origin: Origin,
    /// Nobody asked for a part of the body yet: the first may have come with the head.
    is_new: bool,
}

impl Way {
    /// Looks at the connection until it has brought a part of `body`, or nothing happens to it any more. Says too whether
    /// it is over.
    fn bring(&mut self, body: &mut Incoming, cx: &Context<'_>) -> (Poll<Part>, bool) {
        if self.connection.bell.is_waiting(cx) {
            return (Poll::Pending, false);
        }
        // Whoever polls the connection needn't be woken by the body.
        let mut part = || Pin::new(&mut *body).poll_frame(&mut Context::from_waker(Waker::noop()));
        if std::mem::take(&mut self.is_new)
            && let Poll::Ready(first) = part()
        {
            return (Poll::Ready(first), false);
        }
        loop {
            let over = self.connection.drive().is_ready();
            let polled = part();
            if polled.is_ready() {
                self.connection.bell.look_again();
                return (polled, over);
            }
            if over || self.connection.bell.wait(cx) {
                return (polled, over);
            }
        }
    }
}

impl Answer {
    pub(super) fn new(body: Incoming, connection: Connection, home: Arc<Kept>, origin: Origin) -> Self {
        let way = Way {
            connection,
            home,
            origin,
            is_new: true,
        };
        Self {
            body,
            way: Some(Box::new(way)),
        }
    }

    /// All of the body was taken: the connection waits for the next request, unless the engine closes it.
    fn ended(&mut self) {
        let Some(way) = self.way.take() else { return };
        let Way {
            mut connection,
            home,
            origin,
            ..
        } = *way;
        if connection.rests() {
            connection.bell.leave();
            home.put(&origin, connection);
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = AnswerCut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnswerCut>>> {
        let this = self.get_mut();
        let (polled, over) = match &mut this.way {
            Some(way) => way.bring(&mut this.body, cx),
            None => (Pin::new(&mut this.body).poll_frame(cx), true),
        };
        if over {
            this.way = None;
            if polled.is_pending() {
                return Poll::Ready(Some(Err(AnswerCut::Over)));
            }
        }
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(frame))) => Poll::Ready(Some(Ok(frame))),
            Poll::Ready(Some(Err(error))) => {
                this.way = None;
                Poll::Ready(Some(Err(error.into())))
            }
            Poll::Ready(None) => {
                this.ended();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        // Whoever knows an answer's length doesn't poll behind its last byte.
        if self.body.is_end_stream() {
            self.ended();
        }
    }
}
