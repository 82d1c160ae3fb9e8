//! An engine that tests script: it records what it is asked and answers as told.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use cairn_proto::HeldPort;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinHandle};

/// What an engine does with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    /// Answers with this many chunks and `[DONE]`, or as a whole.
    Answer { chunks: usize },
    /// Answers this status.
    Status(u16),
    /// Sends this many chunks, then breaks the connection.
    Cut { after: usize },
    /// Never answers.
    Hang,
    /// Sends this many chunks and then waits until told to go on.
    Hold { after: usize },
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
}

pub struct State {
    pub mode: Mode,
    pub seen: Vec<Seen>,
    pub cached_tokens: u64,
    pub models: Vec<(String, Option<String>)>,
    pub max_model_len: u32,
    pub root: Option<String>,
    pub healthy: bool,
    /// What `/tokenize` says to every text; 404 where `None`.
    pub tokenize: Option<Vec<u32>>,
}

/// A running engine.
pub struct Engine {
    pub addr: SocketAddr,
    pub state: Arc<Mutex<State>>,
    /// Requests that were neither answered nor given up.
    pub running: Arc<AtomicUsize>,
    /// Requests whose client went away.
    pub cancelled: Arc<AtomicUsize>,
    go_on: watch::Sender<bool>,
    task: JoinHandle<()>,
    connections: Arc<Mutex<Vec<AbortHandle>>>,
    /// Nobody else listens here after the engine has died.
    _port: HeldPort,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

type Body = BoxBody<Bytes, std::io::Error>;

fn whole(status: StatusCode, body: String) -> Response<Body> {
    let full = http_body_util::Full::new(Bytes::from(body)).map_err(|never| match never {});
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(full.boxed())
        .unwrap()
}

struct Running {
    running: Arc<AtomicUsize>,
    cancelled: Arc<AtomicUsize>,
    finished: bool,
}

impl Running {
    fn finish(&mut self) {
        self.finished = true;
    }

    fn new(running: &Arc<AtomicUsize>, cancelled: &Arc<AtomicUsize>) -> Self {
        running.fetch_add(1, Ordering::SeqCst);
        Self {
            running: running.clone(),
            cancelled: cancelled.clone(),
            finished: false,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
        if !self.finished {
            self.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Engine {
    pub async fn start(model: &str) -> Self {
        Self::start_at(0, model).await
    }

    /// At the port of one that died, or at any where it is 0.
    pub async fn start_at(port: u16, model: &str) -> Self {
        let held = HeldPort::hold(port).unwrap();
        let addr = held.address();
        let listener = TcpListener::bind(addr).await.unwrap();
        let state = Arc::new(Mutex::new(State {
            mode: Mode::Answer { chunks: 3 },
            seen: Vec::new(),
            cached_tokens: 0,
            models: vec![(model.to_string(), None)],
            max_model_len: 4096,
            root: None,
            healthy: true,
            tokenize: None,
        }));
        let running = Arc::new(AtomicUsize::new(0));
        let cancelled = Arc::new(AtomicUsize::new(0));
        let (go_on, gone_on) = watch::channel(false);
        let connections = Arc::new(Mutex::new(Vec::new()));
        let task = tokio::spawn({
            let (state, running, cancelled, connections) =
                (state.clone(), running.clone(), cancelled.clone(), connections.clone());
            async move {
                loop {
                    let Ok((stream, _)) = listener.accept().await else {
                        return;
                    };
                    stream.set_nodelay(true).unwrap();
                    let (state, running, cancelled, gone_on) =
                        (state.clone(), running.clone(), cancelled.clone(), gone_on.clone());
                    let connection = tokio::spawn(async move {
                        let service = service_fn(move |request| {
                            let (state, running, cancelled, gone_on) =
                                (state.clone(), running.clone(), cancelled.clone(), gone_on.clone());
                            async move { Ok::<_, Infallible>(answer(state, running, cancelled, gone_on, request).await) }
                        });
                        let _ = hyper::server::conn::http1::Builder::new()
                            .serve_connection(TokioIo::new(stream), service)
                            .await;
                    });
                    connections.lock().push(connection.abort_handle());
                }
            }
        });
        Self {
            addr,
            state,
            running,
            cancelled,
            go_on,
            task,
            connections,
            _port: held,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn set(&self, mode: Mode) {
        self.state.lock().mode = mode;
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.lock().seen.clone()
    }

    /// Lets held streams go on, and does so with later ones.
    pub fn release(&self) {
        self.go_on.send_replace(true);
    }

    /// Holds streams that come from now on.
    pub fn hold(&self) {
        self.go_on.send_replace(false);
    }

    /// Drops the port and every connection at once.
    pub fn kill(&self) {
        self.task.abort();
        for connection in self.connections.lock().drain(..) {
            connection.abort();
        }
    }
}

async fn answer(
    state: Arc<Mutex<State>>,
    running: Arc<AtomicUsize>,
    cancelled: Arc<AtomicUsize>,
    gone_on: watch::Receiver<bool>,
    request: Request<Incoming>,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    match parts.uri.path() {
        "/health" => {
            let status = if state.lock().healthy {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            };
            return whole(status, String::new());
        }
        "/v1/models" => {
            let state = state.lock();
            let data: Vec<_> = state
                .models
                .iter()
                .map(|(id, parent)| {
                    serde_json::json!({"id": id, "parent": parent, "root": state.root, "max_model_len": state.max_model_len})
                })
                .collect();
            return whole(StatusCode::OK, serde_json::json!({"data": data}).to_string());
        }
        "/tokenize" => {
            return match state.lock().tokenize.clone() {
                Some(tokens) => whole(StatusCode::OK, serde_json::json!({"tokens": tokens}).to_string()),
                None => whole(StatusCode::NOT_FOUND, "{}".into()),
            };
        }
        _ => {}
    }
    let bytes = body.collect().await.map(|b| b.to_bytes()).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut guard = Running::new(&running, &cancelled);
    let (mode, cached) = {
        let mut state = state.lock();
        state.seen.push(Seen {
            path: parts.uri.path().into(),
            headers: parts.headers.clone(),
            body: text.clone(),
        });
        (state.mode.clone(), state.cached_tokens)
    };
    let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let usage = serde_json::json!({
        "prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}
    });
    match mode {
        Mode::Status(status) => {
            guard.finish();
            return whole(
                StatusCode::from_u16(status).unwrap(),
                r#"{"error":{"message":"told to"}}"#.into(),
            );
        }
        Mode::Hang => {
            std::future::pending::<()>().await;
        }
        _ => {}
    }
    if json["kv_transfer_params"]["do_remote_decode"] == true {
        guard.finish();
        let reply = serde_json::json!({
            "choices": [{"text": "x"}], "usage": usage,
            "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "p1",
                                   "remote_block_ids": [[1, 2]]},
        });
        return whole(StatusCode::OK, reply.to_string());
    }
    if json["stream"] != true {
        guard.finish();
        if let Mode::Cut { .. } = mode {
            let (send, frames) = mpsc::channel(1);
            send.send(Err(std::io::Error::other("cut"))).await.unwrap();
            let body = StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(frames));
            return Response::new(BodyExt::boxed(body));
        }
        return whole(
            StatusCode::OK,
            serde_json::json!({"choices": [{"text": "hello"}], "usage": usage, "model": json["model"]}).to_string(),
        );
    }
    let with_usage = json["stream_options"]["include_usage"] == true;
    stream(mode, with_usage, usage, guard, gone_on)
}

fn stream(
    mode: Mode,
    with_usage: bool,
    usage: serde_json::Value,
    mut guard: Running,
    mut gone_on: watch::Receiver<bool>,
) -> Response<Body> {
    let (send, frames) = mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(1);
    let (chunks, cut, hold) = match mode {
        Mode::Cut { after } => (after, true, false),
        Mode::Hold { after } => (after, false, true),
        Mode::Answer { chunks } => (chunks, false, false),
        Mode::Status(_) | Mode::Hang => (0, false, false),
    };
    tokio::spawn(async move {
        let event = |json: serde_json::Value| Ok(Frame::data(Bytes::from(format!("data: {json}\n\n"))));
        for i in 0..chunks {
            let json = serde_json::json!({"choices": [{"delta": {"content": format!("t{i}")}}]});
            if send.send(event(json)).await.is_err() {
                return;
            }
        }
        if cut {
            guard.finish();
            let _ = send.send(Err(std::io::Error::other("cut"))).await;
            return;
        }
        if hold {
            tokio::select! {
                _ = gone_on.wait_for(|go| *go) => {}
                () = send.closed() => return,
            }
        }
        if with_usage
            && send
                .send(event(serde_json::json!({"choices": [], "usage": usage})))
                .await
                .is_err()
        {
            return;
        }
        let _ = send
            .send(Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n"))))
            .await;
        guard.finish();
    });
    let body = StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(frames));
    Response::builder()
        .header("content-type", "text/event-stream; charset=utf-8")
        .body(BodyExt::boxed(body))
        .unwrap()
}
