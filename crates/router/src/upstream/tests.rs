//! Against an engine that says exactly what it is told to, byte by byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::{Answer, Origin, Upstream, UpstreamFault};

const WHOLE: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
const CHUNKS: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n";
const HALF: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n";
const LAST: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
const BOUND: Duration = Duration::from_secs(10);

/// What it says to one request.
#[derive(Clone, Copy)]
struct Say {
    text: &'static str,
    /// Whether it closes the connection then.
    close: bool,
}

/// An engine with one script for all connections: its address, how many came, and a word for each that ended.
struct Engine {
    addr: SocketAddr,
    connections: Arc<AtomicUsize>,
    ended: mpsc::UnboundedReceiver<()>,
}

impl Engine {
    async fn start(script: Vec<Say>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (tell, ended) = mpsc::unbounded_channel();
        let (count, next) = (Arc::clone(&connections), Arc::new(AtomicUsize::new(0)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (script, next, tell) = (script.clone(), Arc::clone(&next), tell.clone());
                tokio::spawn(async move {
                    serve(stream, &script, &next).await;
                    let _ = tell.send(());
                });
            }
        });
        Self {
            addr,
            connections,
            ended,
        }
    }

    fn count(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    async fn one_ended(&mut self) {
        tokio::time::timeout(BOUND, self.ended.recv()).await.unwrap();
        // Lets the runtime look at its sockets.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn serve(mut stream: TcpStream, script: &[Say], next: &AtomicUsize) {
    let mut seen = Vec::new();
    loop {
        let mut part = [0; 4096];
        match stream.read(&mut part).await {
            Ok(0) | Err(_) => return,
            Ok(n) => seen.extend_from_slice(&part[..n]),
        }
        if !seen.ends_with(b"\r\n\r\nask") {
            continue;
        }
        assert!(seen.starts_with(b"POST /v1/completions HTTP/1.1\r\n"), "{seen:?}");
        seen.clear();
        let say = script[next.fetch_add(1, Ordering::SeqCst)];
        stream.write_all(say.text.as_bytes()).await.unwrap();
        if say.close {
            return;
        }
    }
}

fn upstream() -> Upstream {
    Upstream::new(1, Duration::from_secs(1), rustls::RootCertStore::empty()).unwrap()
}

async fn ask(upstream: &Upstream, addr: SocketAddr) -> Result<Response<Answer>, UpstreamFault> {
    let origin = Origin::new(Scheme::HTTP, addr.to_string().parse().unwrap()).unwrap();
    let request = Request::post("/v1/completions")
        .body(Full::new(Bytes::from_static(b"ask")))
        .unwrap();
    tokio::time::timeout(BOUND, upstream.send(&origin, request))
        .await
        .unwrap()
}

async fn text(upstream: &Upstream, addr: SocketAddr) -> String {
    let answer = ask(upstream, addr).await.unwrap();
    let bytes = tokio::time::timeout(BOUND, answer.into_body().collect()).await.unwrap();
    String::from_utf8(bytes.unwrap().to_bytes().to_vec()).unwrap()
}

fn stays(text: &'static str) -> Say {
    Say { text, close: false }
}

fn closes(text: &'static str) -> Say {
    Say { text, close: true }
}

#[tokio::test]
async fn one_connection_serves_one_request_after_the_other() {
    let engine = Engine::start(vec![
        stays(WHOLE),
        stays(CHUNKS),
        stays(WHOLE),
        stays(CHUNKS),
        stays(LAST),
        stays(WHOLE),
    ])
    .await;
    let upstream = upstream();
    for _ in 0..5 {
        assert_eq!(text(&upstream, engine.addr).await, "hello");
    }
    assert_eq!(engine.count(), 1);
    // The fifth answer said that it was the last one there.
    assert_eq!(text(&upstream, engine.addr).await, "hello");
    assert_eq!(engine.count(), 2);
}

#[tokio::test]
async fn a_connection_whose_last_frame_was_taken_is_kept_without_another_poll() {
    let engine = Engine::start(vec![stays(WHOLE), stays(WHOLE)]).await;
    let upstream = upstream();
    for _ in 0..2 {
        let mut answer = ask(&upstream, engine.addr).await.unwrap().into_body();
        let frame = answer.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "hello");
    }
    assert_eq!(engine.count(), 1);
}

#[tokio::test]
async fn a_connection_that_the_engine_closed_is_replaced_unnoticed() {
    let mut engine = Engine::start(vec![closes(WHOLE), closes(CHUNKS), closes(WHOLE)]).await;
    let upstream = upstream();
    for n in 1..=3 {
        assert_eq!(text(&upstream, engine.addr).await, "hello");
        assert_eq!(engine.count(), n);
        engine.one_ended().await;
    }
}

#[tokio::test]
async fn an_answer_dropped_midway_closes_its_connection() {
    let mut engine = Engine::start(vec![stays(HALF), stays(WHOLE)]).await;
    let upstream = upstream();
    let mut answer = ask(&upstream, engine.addr).await.unwrap().into_body();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "he");
    drop(answer);
    engine.one_ended().await;
    assert_eq!(text(&upstream, engine.addr).await, "hello");
    assert_eq!(engine.count(), 2);
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_a_cut_and_its_connection_is_gone() {
    let engine = Engine::start(vec![closes(HALF), closes("HTTP/1.1 200"), stays(WHOLE)]).await;
    let upstream = upstream();
    let answer = ask(&upstream, engine.addr).await.unwrap();
    let collected = tokio::time::timeout(BOUND, answer.into_body().collect()).await.unwrap();
    assert!(collected.is_err());
    let cut = ask(&upstream, engine.addr).await.err().unwrap();
    assert_eq!(cut.label(), "cut", "{cut:?}");
    assert_eq!(text(&upstream, engine.addr).await, "hello");
    assert_eq!(engine.count(), 3);
}

#[tokio::test]
async fn where_nobody_listens_nothing_was_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let refused = ask(&upstream(), addr).await.err().unwrap();
    assert_eq!(refused.label(), "connect", "{refused:?}");
}
