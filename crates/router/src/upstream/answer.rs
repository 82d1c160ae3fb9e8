//! An engine's answer: its body drives the connection that it comes over, and gives that back at its end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::connection::Connection;
use super::kept::{Kept, Origin};

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
}

impl Answer {
    pub(super) fn new(body: Incoming, connection: Connection, home: Arc<Kept>, origin: Origin) -> Self {
        let way = Way {
            connection,
            home,
            origin,
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
        } = *way;
        if connection.rests() {
            home.put(&origin, connection);
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = AnswerCut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnswerCut>>> {
        let this = self.get_mut();
        let mut polled = Pin::new(&mut this.body).poll_frame(cx);
        if polled.is_pending() {
            let over = this.way.as_mut().is_none_or(|way| way.connection.drive(cx).is_ready());
            // What has just been read.
            polled = Pin::new(&mut this.body).poll_frame(cx);
            if over {
                this.way = None;
                if polled.is_pending() {
                    return Poll::Ready(Some(Err(AnswerCut::Over)));
                }
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
