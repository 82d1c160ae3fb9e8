//! A fake engine: real ZeroMQ sockets (another implementation than the agent's) and the HTTP endpoints of an engine.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use cairn_proto::HeldPort;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rmpv::Value;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Wire form of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    Maps,
    Arrays,
}

#[derive(Clone)]
pub struct Options {
    pub sglang: bool,
    pub old_server_info: bool,
    /// `/kv_event_sources` is answered.
    pub sources_route: bool,
    pub ranks: u32,
    pub block_size: u32,
    pub replay: bool,
    /// Batches that the replay socket keeps.
    pub kept: usize,
    pub topic: String,
    pub shape: Shape,
    /// Replay answers carry the topic frame.
    pub replay_topic: bool,
    /// The engine connects to this endpoint instead of binding.
    pub connect_to: Option<String>,
    /// Rank `r` publishes at the first one's port plus `r`, as engines do.
    pub adjacent_ports: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sglang: false,
            old_server_info: false,
            sources_route: true,
            ranks: 1,
            block_size: 16,
            replay: true,
            kept: 10_000,
            topic: String::new(),
            shape: Shape::Maps,
            replay_topic: true,
            connect_to: None,
            adjacent_ports: false,
        }
    }
}

/// What the HTTP side answers.
#[derive(Clone)]
pub struct Answers {
    pub start_time: f64,
    pub queries: Vec<u64>,
    pub hits: Vec<u64>,
    pub running: u32,
    pub waiting: u32,
    pub asleep: bool,
    pub down: bool,
    pub unhealthy: bool,
    pub adapters: Vec<String>,
    pub event_ports: Vec<(u16, Option<u16>)>,
    pub requests: Vec<String>,
}

/// A rank's ports, its own through all its lives.
struct Ports {
    live: Option<HeldPort>,
    replay: Option<HeldPort>,
}

impl Ports {
    fn free(options: &Options) -> Self {
        let hold = |wanted: bool| wanted.then(|| HeldPort::hold(0).unwrap());
        Self {
            live: hold(options.connect_to.is_none()),
            replay: hold(options.replay),
        }
    }

    /// As the engine tells them; 0 where it binds nothing.
    fn numbers(&self) -> (u16, Option<u16>) {
        let live = self.live.as_ref().map_or(0, HeldPort::port);
        (live, self.replay.as_ref().map(HeldPort::port))
    }
}

struct Rank {
    publisher: PubSocket,
    seq: u64,
    kept: Arc<Mutex<VecDeque<(u64, Bytes)>>>,
    replays: Arc<Mutex<Vec<u64>>>,
    ports: Ports,
    replay_task: Option<AbortOnDropHandle<()>>,
}

pub struct FakeEngine {
    pub http: SocketAddr,
    pub answers: Arc<Mutex<Answers>>,
    /// Rank that batches name, whichever rank publishes them; their own where `None`.
    pub named_rank: Option<u64>,
    options: Options,
    ranks: Vec<Rank>,
    _http_task: AbortOnDropHandle<()>,
}

/// `count` free ports beside each other.
fn adjacent(count: u32) -> Vec<HeldPort> {
    loop {
        let first = HeldPort::hold(0).unwrap();
        let port = |rank: u32| u16::try_from(u32::from(first.port()) + rank).ok();
        let others: Option<Vec<HeldPort>> = (1..count).map(|rank| HeldPort::hold(port(rank)?).ok()).collect();
        if let Some(others) = others {
            return std::iter::once(first).chain(others).collect();
        }
    }
}

/// Opens the sockets at the ports of an earlier life, or at free ones.
async fn open_rank(options: &Options, ports: Option<Ports>) -> Rank {
    let ports = ports.unwrap_or_else(|| Ports::free(options));
    let mut publisher = PubSocket::new();
    let kept: Arc<Mutex<VecDeque<(u64, Bytes)>>> = Arc::default();
    let replays: Arc<Mutex<Vec<u64>>> = Arc::default();
    match (&options.connect_to, &ports.live) {
        (Some(endpoint), _) => publisher.connect(endpoint).await.unwrap(),
        (None, live) => bind(&mut publisher, live.as_ref().unwrap()).await,
    }
    let mut task = None;
    if let Some(port) = &ports.replay {
        let mut router = RouterSocket::new();
        bind(&mut router, port).await;
        let (kept, replays) = (kept.clone(), replays.clone());
        let topic = options.replay_topic.then(|| Bytes::from(options.topic.clone()));
        task = Some(AbortOnDropHandle::new(tokio::spawn(serve_replay(
            router, kept, replays, topic,
        ))));
    }
    Rank {
        publisher,
        seq: 0,
        kept,
        replays,
        ports,
        replay_task: task,
    }
}

/// Binds, waiting for a socket of an earlier life to let the port go.
async fn bind<S: Socket>(socket: &mut S, port: &HeldPort) {
    let begun = std::time::Instant::now();
    while let Err(error) = socket.bind(&format!("tcp://{}", port.address())).await {
        assert!(begun.elapsed() < crate::PATIENCE, "{port:?} stays taken: {error}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

async fn serve_replay(
    mut router: RouterSocket,
    kept: Arc<Mutex<VecDeque<(u64, Bytes)>>>,
    replays: Arc<Mutex<Vec<u64>>>,
    topic: Option<Bytes>,
) {
    while let Ok(question) = router.recv().await {
        let frames = question.into_vec();
        let [client, _, from] = frames.as_slice() else { continue };
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        replays.lock().push(from);
        let answers: Vec<(u64, Bytes)> = kept.lock().iter().filter(|(seq, _)| *seq >= from).cloned().collect();
        for (seq, payload) in answers {
            send_answer(&mut router, client, topic.as_ref(), &seq.to_be_bytes(), payload).await;
        }
        send_answer(
            &mut router,
            client,
            topic.as_ref().map(|_| Bytes::new()).as_ref(),
            &[0xff; 8],
            Bytes::new(),
        )
        .await;
    }
}

async fn send_answer(router: &mut RouterSocket, client: &Bytes, topic: Option<&Bytes>, seq: &[u8], payload: Bytes) {
    let mut message = ZmqMessage::from(client.clone());
    message.push_back(Bytes::new());
    if let Some(topic) = topic {
        message.push_back(topic.clone());
    }
    message.push_back(Bytes::copy_from_slice(seq));
    message.push_back(payload);
    let _ = router.send(message).await;
}

impl FakeEngine {
    pub async fn start(options: Options) -> Self {
        let mut beside = Vec::new();
        if options.adjacent_ports {
            beside = adjacent(options.ranks);
        }
        let mut beside = beside.into_iter();
        let mut ranks = Vec::new();
        for _ in 0..options.ranks {
            let mut ports = Ports::free(&options);
            ports.live = beside.next().or(ports.live);
            ranks.push(open_rank(&options, Some(ports)).await);
        }
        let count = options.ranks as usize;
        let answers = Arc::new(Mutex::new(Answers {
            start_time: 1.7e9,
            queries: vec![0; count],
            hits: vec![0; count],
            running: 0,
            waiting: 0,
            asleep: false,
            down: false,
            unhealthy: false,
            adapters: Vec::new(),
            event_ports: ranks.iter().map(|r| r.ports.numbers()).collect(),
            requests: Vec::new(),
        }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = listener.local_addr().unwrap();
        let task = tokio::spawn(serve_http(listener, options.clone(), answers.clone()));
        Self {
            http,
            answers,
            named_rank: None,
            options,
            ranks,
            _http_task: AbortOnDropHandle::new(task),
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    pub fn source(&self, rank: usize) -> String {
        format!("{}#{rank}", self.url())
    }

    /// Endpoint and replay endpoint of a rank.
    pub fn endpoints(&self, rank: usize) -> (String, Option<String>) {
        let (port, replay) = self.ranks[rank].ports.numbers();
        (
            format!("tcp://127.0.0.1:{port}"),
            replay.map(|port| format!("tcp://127.0.0.1:{port}")),
        )
    }

    /// Questions to the replay socket so far.
    pub fn replays(&self, rank: usize) -> Vec<u64> {
        self.ranks[rank].replays.lock().clone()
    }

    /// Publishes a batch.
    pub async fn publish(&mut self, rank: usize, events: Vec<Value>) {
        let (seq, payload) = self.keep(rank, events);
        self.send(rank, seq, payload).await;
    }

    /// Keeps a batch for replay without publishing it: a lost message.
    pub fn lose(&mut self, rank: usize, events: Vec<Value>) {
        self.keep(rank, events);
    }

    /// Publishes whatever frames.
    pub async fn send_raw(&mut self, rank: usize, frames: Vec<Bytes>) {
        let mut frames = frames.into_iter();
        let mut message = ZmqMessage::from(frames.next().unwrap());
        for frame in frames {
            message.push_back(frame);
        }
        self.ranks[rank].publisher.send(message).await.unwrap();
    }

    fn keep(&mut self, rank: usize, events: Vec<Value>) -> (u64, Bytes) {
        let kept_most = self.options.kept;
        let named = self.named_rank.unwrap_or(rank as u64);
        let state = &mut self.ranks[rank];
        let seq = state.seq;
        state.seq += 1;
        let batch = Value::Array(vec![
            Value::F64(1.7e9 + seq as f64),
            Value::Array(events),
            Value::from(named),
        ]);
        let mut payload = Vec::new();
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        let payload = Bytes::from(payload);
        let mut kept = state.kept.lock();
        kept.push_back((seq, payload.clone()));
        while kept.len() > kept_most {
            kept.pop_front();
        }
        drop(kept);
        (seq, payload)
    }

    async fn send(&mut self, rank: usize, seq: u64, payload: Bytes) {
        let topic = Bytes::from(self.options.topic.clone());
        self.send_raw(rank, vec![topic, Bytes::copy_from_slice(&seq.to_be_bytes()), payload])
            .await;
    }

    /// Drops every socket and comes up empty at the same addresses, with another process start.
    pub async fn restart(&mut self) {
        self.restart_sockets().await;
        self.answers.lock().start_time += 100.0;
    }

    /// A restart whose event sockets come up at other ports, as `tcp://*:0` gives them.
    pub async fn restart_elsewhere(&mut self) {
        for rank in 0..self.ranks.len() {
            self.ranks[rank] = open_rank(&self.options, None).await;
        }
        let mut answers = self.answers.lock();
        answers.event_ports = self.ranks.iter().map(|r| r.ports.numbers()).collect();
        answers.start_time += 100.0;
    }

    /// The sockets' part of a restart alone: nothing but the event stream shows it.
    pub async fn restart_sockets(&mut self) {
        let ports: Vec<Ports> = self.ranks.drain(..).map(|rank| rank.ports).collect();
        for ports in ports {
            self.ranks.push(open_rank(&self.options, Some(ports)).await);
        }
    }

    /// Cuts the event connections of a living engine; seq and kept batches go on.
    pub async fn cut_events(&mut self, rank: usize) {
        let old = self.ranks.remove(rank);
        let (ports, seq) = (old.ports, old.seq);
        let kept = old.kept.lock().clone();
        drop((old.publisher, old.replay_task));
        let mut fresh = open_rank(&self.options, Some(ports)).await;
        fresh.seq = seq;
        *fresh.kept.lock() = kept;
        self.ranks.insert(rank, fresh);
    }

    pub fn stored(&self, hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
        stored(self.options.shape, hashes, parent, tokens, self.options.block_size)
    }

    pub fn removed(&self, hashes: &[u64]) -> Value {
        let hashes = Value::Array(hashes.iter().map(|h| Value::from(*h)).collect());
        match self.options.shape {
            Shape::Maps => map(vec![
                ("type", "BlockRemoved".into()),
                ("block_hashes", hashes),
                ("medium", "GPU".into()),
            ]),
            Shape::Arrays => Value::Array(vec!["BlockRemoved".into(), hashes, "GPU".into()]),
        }
    }

    pub fn cleared(&self) -> Value {
        match self.options.shape {
            Shape::Maps => map(vec![("type", "AllBlocksCleared".into())]),
            Shape::Arrays => Value::Array(vec!["AllBlocksCleared".into()]),
        }
    }
}

fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(fields.into_iter().map(|(k, v)| (Value::from(k), v)).collect())
}

fn stored(shape: Shape, hashes: &[u64], parent: Option<u64>, tokens: &[u32], block_size: u32) -> Value {
    let hashes = Value::Array(hashes.iter().map(|h| Value::from(*h)).collect());
    let parent = parent.map_or(Value::Nil, Value::from);
    let tokens = Value::Array(tokens.iter().map(|t| Value::from(*t)).collect());
    match shape {
        Shape::Maps => map(vec![
            ("type", "BlockStored".into()),
            ("block_hashes", hashes),
            ("parent_block_hash", parent),
            ("token_ids", tokens),
            ("block_size", block_size.into()),
            ("medium", "GPU".into()),
        ]),
        Shape::Arrays => Value::Array(vec![
            "BlockStored".into(),
            hashes,
            parent,
            tokens,
            block_size.into(),
            Value::Nil,
            "GPU".into(),
        ]),
    }
}

async fn serve_http(listener: tokio::net::TcpListener, options: Options, answers: Arc<Mutex<Answers>>) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            return;
        };
        let (options, answers) = (options.clone(), answers.clone());
        tasks.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let reply = answer(&options, &mut answers.lock(), request.uri().path());
                async move { Ok::<_, Infallible>(reply) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn answer(options: &Options, answers: &mut Answers, path: &str) -> Response<Full<Bytes>> {
    let reply = |status: StatusCode, body: String| {
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response
    };
    answers.requests.push(path.to_owned());
    if answers.down {
        return reply(StatusCode::SERVICE_UNAVAILABLE, "loading".into());
    }
    let (status, body) = match path {
        "/v1/models" => (StatusCode::OK, models(options, answers)),
        "/metrics" => (StatusCode::OK, metrics(options, answers)),
        "/health" if answers.unhealthy => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
        "/health" => (StatusCode::OK, String::new()),
        "/kv_event_sources" if options.sources_route && !options.sglang => (StatusCode::OK, sources(options, answers)),
        "/server_info" if options.sglang && !options.old_server_info => (StatusCode::OK, server_info(options, answers)),
        "/get_server_info" if options.sglang => (StatusCode::OK, server_info(options, answers)),
        _ => (StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}".into()),
    };
    reply(status, body)
}

fn models(options: &Options, answers: &Answers) -> String {
    let owner = if options.sglang { "sglang" } else { "vllm" };
    let mut data = vec![
        serde_json::json!({"id": "tiny", "object": "model", "owned_by": owner, "root": "/models/tiny", "parent": null, "max_model_len": 8192}),
    ];
    for adapter in &answers.adapters {
        data.push(
            serde_json::json!({"id": adapter, "object": "model", "owned_by": owner, "root": "/x", "parent": "tiny"}),
        );
    }
    serde_json::json!({"object": "list", "data": data}).to_string()
}

fn sources(options: &Options, answers: &Answers) -> String {
    let mut all = serde_json::Map::new();
    for (rank, (port, replay)) in answers.event_ports.iter().enumerate() {
        all.insert(
            rank.to_string(),
            serde_json::json!({
                "endpoint": format!("tcp://*:{port}"),
                "replay_endpoint": replay.map(|port| format!("tcp://*:{port}")),
                "topic": options.topic,
            }),
        );
    }
    serde_json::Value::Object(all).to_string()
}

fn server_info(options: &Options, answers: &Answers) -> String {
    let (port, replay) = answers.event_ports[0];
    let events = serde_json::json!({
        "publisher": "zmq", "endpoint": format!("tcp://*:{port}"),
        "replay_endpoint": replay.map(|port| format!("tcp://*:{port}")), "topic": options.topic,
    });
    serde_json::json!({
        "model_path": "/models/tiny", "page_size": options.block_size, "dp_size": options.ranks,
        "kv_events_config": events.to_string(), "max_total_num_tokens": 4096, "max_running_requests": 32,
        "chunked_prefill_size": 2048, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998,
        "internal_states": [{}],
    })
    .to_string()
}

fn metrics(options: &Options, answers: &Answers) -> String {
    use std::fmt::Write;
    let mut page = format!("process_start_time_seconds {}\n", answers.start_time);
    for rank in 0..options.ranks as usize {
        let (queries, hits) = (answers.queries[rank], answers.hits[rank]);
        let (running, waiting, asleep) = (answers.running, answers.waiting, i32::from(answers.asleep));
        if options.sglang {
            let labels = format!("{{model_name=\"tiny\",dp_rank=\"{rank}\"}}");
            write!(
                page,
                "sglang:num_running_reqs{labels} {running}\nsglang:num_queue_reqs{labels} {waiting}\n\
                 sglang:token_usage{labels} 0.5\nsglang:prompt_tokens_total{labels} {queries}\n\
                 sglang:cached_tokens_total{labels} {hits}\n"
            )
            .unwrap();
            continue;
        }
        let labels = format!("{{engine=\"{rank}\",model_name=\"tiny\"}}");
        write!(
            page,
            "vllm:num_requests_running{labels} {running}\nvllm:num_requests_waiting{labels} {waiting}\n\
             vllm:kv_cache_usage_perc{labels} 0.5\nvllm:num_preemptions_total{labels} 3\n\
             vllm:prefix_cache_queries_total{labels} {queries}\nvllm:prefix_cache_hits_total{labels} {hits}\n\
             vllm:engine_sleep_state{{engine=\"{rank}\",sleep_state=\"awake\"}} {}\n\
             vllm:engine_sleep_state{{engine=\"{rank}\",sleep_state=\"discard_all\"}} {asleep}\n\
             vllm:cache_config_info{{block_size=\"{}\",engine=\"{rank}\",num_gpu_blocks=\"256\"}} 1.0\n",
            1 - asleep,
            options.block_size
        )
        .unwrap();
    }
    page
}
