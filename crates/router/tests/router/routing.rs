//! Where requests go when the router follows an index.

use std::collections::BTreeMap;

use cairn_index::{Command, Op, Role};
use cairn_router::{Config, Running};

use super::client::{get, metric, open, post, send, until};
use super::engine::{Engine, Mode};
use super::index::{Index, Registered};
use super::router;

/// Engines, registered in the order of their numbers.
pub struct World {
    pub index: Index,
    pub engines: Vec<Engine>,
    pub workers: Vec<Registered>,
}

impl World {
    pub async fn start(n: usize) -> Self {
        Self::start_with(n, 4096).await
    }

    pub async fn start_with(n: usize, max_model_len: u32) -> Self {
        let index = Index::start().await;
        index
            .max_model_len
            .store(max_model_len, std::sync::atomic::Ordering::SeqCst);
        let mut engines = Vec::new();
        let mut workers = Vec::new();
        for _ in 0..n {
            let engine = Engine::start("m").await;
            workers.push(index.register(&engine.url(), Role::Both, 0, 1));
            engines.push(engine);
        }
        Self {
            index,
            engines,
            workers,
        }
    }

    pub fn config(&self) -> Config {
        Config {
            listen: "127.0.0.1:0".into(),
            index: vec![self.index.url()],
            check_interval_ms: 100,
            ..Config::default()
        }
    }

    /// A router whose view has everything that was committed and whose engines are all healthy.
    pub async fn router(&self) -> Running {
        self.router_with(self.config()).await
    }

    pub async fn router_with(&self, config: Config) -> Running {
        let running = router(config).await;
        self.caught_up(&running).await;
        running
    }

    pub async fn caught_up(&self, running: &Running) {
        let applied = self.index.inner.lock().state.applied().0;
        let deadline = tokio::time::Instant::now() + super::client::BOUND;
        loop {
            let status = status(running).await;
            let healthy = status["workers"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|w| w["health"] == "healthy")
                .count();
            let tokenizer = status["pools"][0]["tokenizer"]
                .as_str()
                .unwrap_or_default()
                .contains("built in");
            if status["view"]["applied_index"].as_u64() >= Some(applied) && healthy == self.engines.len() && tokenizer {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "the router didn't catch up: {status}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// How many requests each engine got.
    pub fn counts(&self) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.seen().len()).collect()
    }
}

pub async fn status(running: &Running) -> serde_json::Value {
    send(running.addr, get("/cairn/status")).await.json()
}

pub fn tokens(from: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (from * 7919 + i * 31) % 4000).collect()
}

pub fn token_body(tokens: &[u32]) -> String {
    serde_json::json!({ "model": "m", "prompt": tokens }).to_string()
}

#[tokio::test]
async fn requests_go_where_their_blocks_are_and_explain_says_why() {
    let world = World::start(3).await;
    let prompt = tokens(1, 1000);
    world.index.store(&world.workers[2], &prompt[..800], "");
    world.engines[2].state.lock().cached_tokens = 800;
    let router = world.router().await;
    let mut request = post("/v1/completions", token_body(&prompt));
    request.headers_mut().insert("x-cairn-debug", "1".parse().unwrap());
    let answer = send(router.addr, request).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(world.counts(), [0, 0, 1]);
    assert_eq!(answer.headers["x-cairn-overlap"], "800");
    assert_eq!(
        answer.headers["x-cairn-worker"],
        format!("{}#0", world.engines[2].url()).as_str()
    );

    let told = send(router.addr, post("/cairn/explain", token_body(&prompt)))
        .await
        .json();
    assert_eq!(told["pool"], "m");
    assert_eq!(told["tokens"], 1000);
    assert_eq!(told["policy"], "kv");
    assert_eq!(told["chosen"], format!("{}#0", world.engines[2].url()));
    let rows = told["candidates"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        for key in [
            "eligible",
            "why_not",
            "gpu_tokens",
            "cpu_tokens",
            "shared_tokens",
            "queue_ms",
            "prefill_ms",
            "fetch_ms",
            "cost_ms",
        ] {
            assert!(row.get(key).is_some(), "{key} is missing in {row}");
        }
    }
    assert_eq!(rows[2]["gpu_tokens"], 800);
    assert_eq!(rows[0]["why_zero"][0]["why"], "cache_empty");
    assert_eq!(world.counts(), [0, 0, 1], "explaining sends nothing");

    let past = send(router.addr, get("/cairn/decisions?limit=5")).await.json();
    assert_eq!(past["decisions"].as_array().unwrap().len(), 1);
    assert_eq!(past["decisions"][0]["chosen"], told["chosen"]);
    assert_eq!(metric(router.addr, "cairn_router_predicted_tokens_total").await, 800.0);
    assert_eq!(metric(router.addr, "cairn_router_cached_tokens_total").await, 800.0);
}

#[tokio::test]
async fn chats_are_tokenised_as_engines_do_and_meet_their_blocks() {
    let world = World::start(2).await;
    let text = "a system prompt that many requests share. ".repeat(60);
    let body = serde_json::json!({"model": "alias/of-m", "messages": [
        {"role": "system", "content": text}, {"role": "user", "content": "hello \u{1f642} \u{d7}"}]});
    let model = cairn_tokens::ModelTokens::embedded().unwrap();
    let ids = model
        .encode_chat(&cairn_tokens::ChatRequest::from_body(&body).unwrap())
        .unwrap()
        .ids;
    world.index.store(&world.workers[1], &ids, "");
    let router = world.router().await;
    let told = send(router.addr, post("/cairn/explain", body.to_string())).await.json();
    assert_eq!(told["tokens"], ids.len());
    assert_eq!(told["chosen"], format!("{}#0", world.engines[1].url()));
    let reordered = format!(
        r#"{{"messages":[{{"content":{},"role":"system"}},  {{"content":[{{"text":"hello \ud83d\ude42 \u00d7","type":"text"}}],"role":"user"}}],"model":"m"}}"#,
        serde_json::json!(text)
    );
    let again = send(router.addr, post("/cairn/explain", reordered)).await.json();
    assert_eq!(again["tokens"], told["tokens"]);
    assert_eq!(
        again["candidates"][1]["gpu_tokens"],
        told["candidates"][1]["gpu_tokens"]
    );
}

#[tokio::test]
async fn equal_prompts_with_other_salts_never_match() {
    let world = World::start(2).await;
    let prompt = tokens(5, 640);
    world.index.store(&world.workers[0], &prompt, "a");
    let router = world.router().await;
    let ask = async |salt: Option<&str>| {
        let body = serde_json::json!({"model": "m", "prompt": prompt, "cache_salt": salt}).to_string();
        let told = send(router.addr, post("/cairn/explain", body)).await.json();
        told["candidates"][0]["gpu_tokens"].as_u64().unwrap()
    };
    assert_eq!(ask(Some("a")).await, 624);
    assert_eq!(ask(Some("b")).await, 0);
    assert_eq!(ask(None).await, 0);
}

#[tokio::test]
async fn the_chosen_rank_is_sent_and_a_clients_own_is_not() {
    let index = Index::start().await;
    let engine = Engine::start("m").await;
    let workers: Vec<_> = (0..2)
        .map(|rank| index.register(&engine.url(), Role::Both, rank, 2))
        .collect();
    let prompt = tokens(9, 320);
    index.store(&workers[1], &prompt, "");
    let world = World {
        index,
        engines: vec![engine],
        workers,
    };
    let running = router(world.config()).await;
    until_applied(&world, &running).await;
    let mut request = post("/v1/completions", token_body(&prompt));
    request
        .headers_mut()
        .insert("x-data-parallel-rank", "0".parse().unwrap());
    assert_eq!(send(running.addr, request).await.status, 200);
    assert_eq!(world.engines[0].seen()[0].headers["x-data-parallel-rank"], "1");
}

async fn until_applied(world: &World, running: &Running) {
    let applied = world.index.inner.lock().state.applied().0;
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    while status(running).await["view"]["applied_index"].as_u64() < Some(applied) {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn with_every_index_node_gone_requests_still_succeed_from_the_last_view() {
    let world = World::start(2).await;
    let prompt = tokens(3, 480);
    world.index.store(&world.workers[1], &prompt, "");
    // What the last view promises is true, and the engine says so.
    world.engines[1].state.lock().cached_tokens = 464;
    let router = world.router().await;
    world.index.kill();
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    while status(&router).await["view"]["state"] != "last" {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    for _ in 0..5 {
        assert_eq!(
            send(router.addr, post("/v1/completions", token_body(&prompt)))
                .await
                .status,
            200
        );
    }
    let told = send(router.addr, get("/cairn/decisions?limit=5")).await.body;
    assert_eq!(world.counts(), [0, 5], "{told}");
}

#[tokio::test]
async fn a_view_moves_on_to_a_fresher_node_and_never_goes_back() {
    let world = World::start(1).await;
    let second = Index::over(world.index.inner.clone()).await;
    let config = Config {
        index: vec![world.index.url(), second.url()],
        ..world.config()
    };
    let router = world.router_with(config).await;
    let followed = status(&router).await["view"]["node"].as_str().unwrap().to_string();
    let (stale, fresh) = if followed == world.index.url() {
        (&world.index, &second)
    } else {
        (&second, &world.index)
    };
    stale.quorum_age_ms.store(5_000, std::sync::atomic::Ordering::SeqCst);
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    loop {
        let view = status(&router).await["view"].clone();
        if view["node"] == fresh.url() && view["state"] == "current" {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{view}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let follow = fresh.follows.lock().last().unwrap().clone();
    assert!(
        follow.applied_index > 0,
        "the view asks for what comes after its own state"
    );
    assert_eq!(follow.digest, world.index.inner.lock().state.digest().0);
}

#[tokio::test]
async fn the_last_known_engines_serve_a_router_that_starts_without_any_index_node() {
    let world = World::start(2).await;
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        data_dir: dir.path().display().to_string(),
        ..world.config()
    };
    let first = world.router_with(config.clone()).await;
    let file = dir.path().join("engines.commands");
    until("the file of engines", || file.exists()).await;
    first.stop().await;
    world.index.kill();
    let second = router(config).await;
    assert_eq!(status(&second).await["view"]["state"], "absent");
    let answer = send(second.addr, post("/v1/completions", token_body(&tokens(1, 100)))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

#[tokio::test]
async fn a_burst_of_one_cold_prefix_lands_on_two_workers_at_most_through_one_router_or_two() {
    let world = World::start(4).await;
    for engine in &world.engines {
        engine.set(Mode::Hold { after: 0 });
    }
    let routers = [world.router().await, world.router().await];
    for (round, n) in [(0u32, 1usize), (1, 2)] {
        for engine in &world.engines {
            engine.hold();
        }
        let before = world.counts();
        let mut asks = Vec::new();
        for i in 0..16u32 {
            let mut prompt = tokens(50 + round, 3000);
            prompt.extend(tokens(1000 + round * 100 + i, 40));
            let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": true}).to_string();
            let at = routers[i as usize % n].addr;
            asks.push(tokio::spawn(async move {
                send(at, post("/v1/completions", body)).await.status
            }));
            if n == 2 {
                // Reservations travel every 50 ms; a burst over two routers is spread over a few of these.
                for router in &routers {
                    until_counted(router, u64::from(i) + 1).await;
                }
            }
        }
        until("all requests at engines", || {
            world.counts().iter().sum::<usize>() == before.iter().sum::<usize>() + 16
        })
        .await;
        let hit = world
            .counts()
            .iter()
            .zip(&before)
            .filter(|(now, then)| now > then)
            .count();
        assert!(hit <= 2, "round {round}: {:?} after {before:?}", world.counts());
        for engine in &world.engines {
            engine.release();
        }
        for ask in asks {
            assert_eq!(ask.await.unwrap(), 200);
        }
    }
}

/// Waits until a router counts this many requests at all workers, its own and others'.
async fn until_counted(router: &Running, requests: u64) {
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    loop {
        let seen = status(router).await;
        let workers = seen["workers"].as_array().unwrap().iter();
        let counted = workers.map(|w| w["own_requests"].as_u64().unwrap() + w["other_requests"].as_u64().unwrap());
        if counted.sum::<u64>() == requests {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{requests} requests: {seen}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_router_sees_the_load_of_another_one() {
    let world = World::start(2).await;
    for engine in &world.engines {
        engine.set(Mode::Hold { after: 1 });
    }
    let (a, b) = (world.router().await, world.router().await);
    let prompt = tokens(70, 2000);
    world.index.store(&world.workers[0], &prompt, "");
    world.caught_up(&a).await;
    world.caught_up(&b).await;
    let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": true}).to_string();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(open(a.addr, post("/v1/completions", body.clone())).await);
    }
    assert_eq!(world.counts(), [3, 0]);
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    loop {
        let seen = status(&b).await["workers"][0]["other_requests"].as_u64().unwrap();
        if seen == 3 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let mut chosen = BTreeMap::new();
    for i in 0..20 {
        let told = send(b.addr, post("/cairn/explain", token_body(&tokens(2000 + i, 64))))
            .await
            .json();
        *chosen.entry(told["chosen"].as_str().unwrap().to_string()).or_insert(0) += 1;
    }
    let idle = format!("{}#0", world.engines[1].url());
    assert!(chosen.get(&idle).copied().unwrap_or(0) >= 18, "{chosen:?}");
    drop(streams);
    until("the streams' end", || {
        world.engines[0].running.load(std::sync::atomic::Ordering::SeqCst) == 0
    })
    .await;
}

#[tokio::test]
async fn a_drained_worker_and_an_emptied_cache_are_seen_at_once() {
    let world = World::start(2).await;
    let prompt = tokens(11, 640);
    world.index.store(&world.workers[0], &prompt, "");
    let router = world.router().await;
    world.index.ops(
        &world.workers[0],
        vec![Op::Clear {
            holder: world.workers[0].holders[0],
        }],
    );
    world.caught_up(&router).await;
    let told = send(router.addr, post("/cairn/explain", token_body(&prompt)))
        .await
        .json();
    assert_eq!(told["candidates"][0]["gpu_tokens"], 0);
    world.index.commit(&Command::SetDraining {
        worker: world.workers[1].worker,
        draining: true,
    });
    world.caught_up(&router).await;
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    while status(&router).await["workers"][1]["draining"] != true {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    for i in 0..4 {
        assert_eq!(
            send(router.addr, post("/v1/completions", token_body(&tokens(i, 90))))
                .await
                .status,
            200
        );
    }
    assert_eq!(world.counts(), [4, 0]);
}

#[tokio::test]
async fn policies_are_chosen_by_request_where_allowed() {
    let world = World::start(2).await;
    let prompt = tokens(21, 900);
    world.index.store(&world.workers[0], &prompt, "");
    let router = world
        .router_with(Config {
            allow_policy_header: true,
            ..world.config()
        })
        .await;
    for _ in 0..6 {
        let mut request = post("/v1/completions", token_body(&prompt));
        request
            .headers_mut()
            .insert("x-cairn-policy", "round-robin".parse().unwrap());
        assert_eq!(send(router.addr, request).await.status, 200);
    }
    assert_eq!(world.counts(), [3, 3]);
    let mut request = post("/v1/completions", token_body(&prompt));
    request.headers_mut().insert("x-cairn-policy", "best".parse().unwrap());
    let answer = send(router.addr, request).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (400, "unknown_policy")
    );
    for engine in &world.engines {
        assert!(
            engine
                .seen()
                .iter()
                .all(|seen| !seen.headers.contains_key("x-cairn-policy"))
        );
    }
}

#[tokio::test]
async fn where_the_tokenizer_differs_from_its_engine_the_engine_itself_is_asked() {
    let world = World::start(2).await;
    let theirs = tokens(77, 333);
    for engine in &world.engines {
        engine.state.lock().tokenize = Some(theirs.clone());
    }
    world.index.store(&world.workers[1], &theirs, "");
    let router = world.router().await;
    let deadline = tokio::time::Instant::now() + super::client::BOUND;
    while !status(&router).await["pools"][0]["tokenizer"]
        .as_str()
        .unwrap()
        .contains("OTHER")
    {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{}",
            status(&router).await["pools"]
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let body = serde_json::json!({"model": "m", "prompt": "some text"}).to_string();
    for _ in 0..2 {
        let told = send(router.addr, post("/cairn/explain", body.clone())).await.json();
        assert_eq!(told["tokens"], 333);
        assert_eq!(told["candidates"][1]["gpu_tokens"], 320);
    }
    for engine in &world.engines {
        engine.kill();
    }
    let told = send(router.addr, post("/cairn/explain", body.clone())).await;
    assert!(told.status == 503 || told.json()["tokens"] == 333, "{told:?}");
}
