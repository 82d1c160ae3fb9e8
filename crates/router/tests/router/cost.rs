//! What a request costs the router in CPU and time; run by hand, prints figures.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::client::{metric, post};
use super::engine::Mode;
use super::routing::World;

/// CPU time of the threads whose name starts with `name`.
fn cpu(name: &str) -> Duration {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if comm.starts_with(name) {
            let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            sum += stat
                .split(' ')
                .next()
                .and_then(|ns| ns.parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    Duration::from_nanos(sum)
}

#[test]
#[ignore = "prints figures: cargo test --release -p cairn-router --test router cost -- --ignored --nocapture"]
fn cost_of_a_request() {
    let runtime = |name: &str| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(name)
            .enable_all()
            .build()
            .unwrap()
    };
    let (own, world_runtime) = (runtime("rt-router"), runtime("rt-world"));
    let world = world_runtime.block_on(World::start_with(4, 32_768));
    let config = cairn_router::Config {
        check_interval_ms: 1_000,
        ..world.config()
    };
    let router = own.block_on(own.spawn(cairn_router::start(config))).unwrap().unwrap();
    world_runtime.block_on(world.caught_up(&router));
    let at = router.addr;
    for (bytes, stream, chunks) in [
        (2 << 10, false, 0),
        (32 << 10, false, 0),
        (2 << 10, true, 1),
        (2 << 10, true, 101),
    ] {
        for engine in &world.engines {
            engine.set(Mode::Answer { chunks });
        }
        let body = move |i: usize| {
            let words = format!(
                "shared system message number {} with plain English words in it. ",
                i % 64
            );
            let system = words.repeat((bytes - 200) / words.len());
            let user = format!(
                "a user message never sent before, number {i}, asking for something {}",
                i * 7919
            );
            serde_json::json!({"model": "m", "stream": stream, "messages": [
                {"role": "system", "content": system}, {"role": "user", "content": user}]})
            .to_string()
        };
        world_runtime.block_on(async move {
            let socket = tokio::net::TcpStream::connect(at).await.unwrap();
            socket.set_nodelay(true).unwrap();
            let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await.unwrap();
            tokio::spawn(connection);
            let mut ask = async |i: usize| {
                let response = sender
                    .send_request(post("/v1/chat/completions", body(i)))
                    .await
                    .unwrap();
                assert_eq!(response.status(), 200);
                response.into_body().collect().await.unwrap();
                sender.ready().await.unwrap();
            };
            for i in 0..128 {
                ask(i).await;
            }
            let (before, started) = (cpu("rt-router"), Instant::now());
            const N: usize = 1_000;
            for i in 0..N {
                ask(1_000 + i).await;
            }
            let (used, took) = (cpu("rt-router") - before, started.elapsed());
            let took_in = async |what: &str| {
                let sum = metric(at, &format!("cairn_router_{what}_seconds_sum")).await;
                let count = metric(at, &format!("cairn_router_{what}_seconds_count")).await;
                (sum * 1e6 / count) as u64
            };
            println!(
                "mean so far: {} us to tokens, {} us to sending on",
                took_in("tokenize").await,
                took_in("overhead").await
            );
            println!(
                "{bytes} bytes, stream {stream}, {chunks} chunks: {} us CPU a request, {} us a request in all",
                used.as_micros() / N as u128,
                took.as_micros() / N as u128
            );
        });
    }
    let before = cpu("rt-router");
    std::thread::sleep(Duration::from_secs(3));
    println!("idle: {} us CPU a second", (cpu("rt-router") - before).as_micros() / 3);
    own.block_on(router.stop());
}
