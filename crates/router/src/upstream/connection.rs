//! One connection to an engine, without a task of its own: it reads and writes while somebody polls it.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::chain;
use crate::bell::Bell;

type Io = MaybeHttpsStream<TokioIo<TcpStream>>;

/// An open connection.
pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` once it is over.
    driver: Option<Box<http1::Connection<Io, Full<Bytes>>>>,
    /// Rung when something happened to it since it was last driven.
    pub(super) bell: Arc<Bell>,
    rings: Waker,
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    /// The connection was closed before anything of the request was written.
    Unsent(Box<Request<Full<Bytes>>>),
    /// It ended before the answer began.
    Cut(String),
}

impl Connection {
    /// Over a connected stream.
    pub(super) async fn open(io: Io) -> Result<Self, hyper::Error> {
        let (sender, driver) = http1::handshake(io).await?;
        let bell = Bell::new();
        Ok(Self {
            sender,
            driver: Some(Box::new(driver)),
            rings: bell.waker(),
            bell,
        })
    }

    /// Reads and writes what can be; ready once the connection is over. Rings when there is more to do.
    pub(super) fn drive(&mut self) -> Poll<()> {
        self.bell.look();
        if let Some(driver) = &mut self.driver {
            match Pin::new(driver).poll(&mut Context::from_waker(&self.rings)) {
                Poll::Pending => return Poll::Pending,
                // How it ended is told to the request or the body that was under way.
                Poll::Ready(_) => self.driver = None,
            }
        }
        Poll::Ready(())
    }

    /// Whether it is still open and has nothing to do: the last answer was read to its end, and the engine didn't close it
    /// since.
    pub(super) fn rests(&mut self) -> bool {
        let untouched = self.bell.is_quiet() && self.driver.is_some() && self.sender.is_ready();
        untouched || (self.drive().is_pending() && self.sender.is_ready())
    }

    /// Sends a request and gives the head of its answer; dropping the future closes the connection.
    pub(super) async fn exchange(
        mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Self), NoAnswer> {
        let mut answer = pin!(self.sender.try_send_request(request));
        self.bell.look_again();
        let answered = poll_fn(|cx| {
            if self.bell.is_waiting(cx) {
                return Poll::Pending;
            }
            loop {
                let over = self.drive().is_ready();
                // What has just been read; the connection alone wakes the task.
                match answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(answered) => return Poll::Ready(Some(answered)),
                    Poll::Pending if over => return Poll::Ready(None),
                    Poll::Pending if self.bell.wait(cx) => return Poll::Pending,
                    Poll::Pending => {}
                }
            }
        })
        .await;
        match answered {
            Some(Ok(response)) => Ok((response, self)),
            Some(Err(mut failed)) => Err(match failed.take_message() {
                Some(request) => NoAnswer::Unsent(Box::new(request)),
                None => NoAnswer::Cut(chain(failed.error())),
            }),
            None => Err(NoAnswer::Cut("the connection is over".into())),
        }
    }
}
