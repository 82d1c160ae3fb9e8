//! Mock engines that answer at once, so that what is left is the router.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;

use super::prompts::MODEL;

/// Chunks of a streamed answer.
pub const CHUNKS: usize = 20;

/// Mock engines on a thread of their own; they end with the process.
pub struct Mocks {
    /// Base URLs.
    pub urls: Vec<String>,
}

impl Mocks {
    /// Starts `count` engines; chunks of streams come `chunk_gap` apart.
    pub fn start(count: usize, chunk_gap: Duration) -> anyhow::Result<Self> {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::Builder::new().name("mock-engines".into()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(tell.send(Err(anyhow::Error::from(error)))),
            };
            runtime.block_on(async move {
                let mut urls = Vec::new();
                for _ in 0..count {
                    match TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await {
                        Ok(listener) => {
                            let port = listener.local_addr().map(|a| a.port()).unwrap_or_default();
                            urls.push(format!("http://127.0.0.1:{port}"));
                            tokio::spawn(serve(listener, chunk_gap));
                        }
                        Err(error) => return drop(tell.send(Err(error.into()))),
                    }
                }
                drop(tell.send(Ok(urls)));
                std::future::pending::<()>().await;
            });
        })?;
        Ok(Self {
            urls: told.recv().context("the mock engines' thread ended")??,
        })
    }
}

async fn serve(listener: TcpListener, chunk_gap: Duration) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        // Without it the peer's delayed acknowledgement would be measured instead of the router.
        let _ = stream.set_nodelay(true);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, chunk_gap));
            // A client that goes away ends its connection, nothing else.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn answer(request: Request<Incoming>, chunk_gap: Duration) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let Ok(body) = request.into_body().collect().await else {
        return Ok(whole(json!({})));
    };
    let body = body.to_bytes();
    Ok(match path.as_str() {
        "/v1/chat/completions" | "/v1/completions" => {
            let end = &body[body.len().saturating_sub(512)..];
            let streamed = [&b"\"stream\":true"[..], &b"\"stream\": true"[..]];
            if streamed
                .iter()
                .any(|flag| contains(end, flag) || contains(&body[..body.len().min(512)], flag))
            {
                events(chunk_gap)
            } else {
                whole(completion())
            }
        }
        "/v1/models" => {
            let model =
                json!({"id": MODEL, "object": "model", "owned_by": "bench", "root": MODEL, "max_model_len": 131_072});
            whole(json!({"object": "list", "data": [model]}))
        }
        "/get_model_info" | "/model_info" => whole(json!({"model_path": MODEL, "is_generation": true})),
        "/get_server_info" | "/server_info" => {
            whole(json!({"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "max_running_requests": 1024}))
        }
        "/metrics" => text("vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_waiting{engine=\"0\"} 0\n"),
        _ => text("ok"),
    })
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|w| w == needle)
}

fn completion() -> serde_json::Value {
    json!({
        "id": "chatcmpl-bench", "object": "chat.completion", "created": 0, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 1, "total_tokens": 501, "prompt_tokens_details": {"cached_tokens": 0}},
    })
}

fn whole(value: serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync());
    response
        .headers_mut()
        .insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

fn text(body: &'static str) -> Response<Body> {
    Response::new(Full::new(Bytes::from_static(body.as_bytes())).boxed_unsync())
}

fn events(gap: Duration) -> Response<Body> {
    let chunk = json!({
        "id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 0, "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": null}],
    });
    let chunk = Bytes::from(format!("data: {chunk}\n\n"));
    let frames = futures::stream::iter(0..=CHUNKS).then(move |i| {
        let chunk = chunk.clone();
        async move {
            if i > 0 && !gap.is_zero() {
                tokio::time::sleep(gap).await;
            }
            Ok(Frame::data(if i < CHUNKS {
                chunk
            } else {
                Bytes::from_static(b"data: [DONE]\n\n")
            }))
        }
    });
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    response
        .headers_mut()
        .insert("content-type", http::HeaderValue::from_static("text/event-stream"));
    response
}
