//! A real cluster of real processes for tests: started through the binary, asked over HTTP, ended by signal.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::print_stderr)]

#[path = "../../../../tests/watch.rs"]
pub mod watch;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cairn_proto::HeldPort;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Longest wait for anything that must come about or end.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub const CAIRN: &str = env!("CARGO_BIN_EXE_cairn");

/// A running `cairn up`, ended when dropped.
pub struct Cluster {
    pub ready: Value,
    child: Child,
}

impl Cluster {
    pub fn up(args: &[&str]) -> Self {
        let begun = watch::Watch::start();
        let mut child = Command::new(CAIRN)
            .args(["up", "--port", "0", "--json"])
            .args(args)
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("`cairn up` printed {line:?}: {e}"));
        assert_eq!(ready["ready"], true);
        begun.within(Duration::from_secs(30), "the cluster is up");
        Self { ready, child }
    }

    pub fn router(&self, i: usize) -> String {
        self.ready["routers"][i].as_str().unwrap().to_owned()
    }

    pub fn engine(&self, i: usize) -> String {
        self.ready["engines"][i].as_str().unwrap().to_owned()
    }

    pub fn index(&self) -> String {
        let nodes: Vec<&str> = self.ready["index"]
            .as_array()
            .unwrap()
            .iter()
            .map(|a| a.as_str().unwrap())
            .collect();
        nodes.join(",")
    }

    /// Kills one child at once, as a crash would.
    pub fn crash(&self, name: &str) {
        let pid = self.ready["pids"][name]
            .as_u64()
            .unwrap_or_else(|| panic!("no child {name}: {}", self.ready["pids"]));
        signal(pid, Signal::KILL);
    }

    /// Runs a subcommand and returns its JSON.
    pub fn ask(&self, args: &[&str]) -> Value {
        ask(args)
    }

    pub fn status(&self) -> Value {
        ask(&["status", "--json", "--index", &self.index()])
    }

    /// Asks the cluster to end and waits; panics if it doesn't end cleanly.
    pub fn end(mut self) {
        signal(u64::from(self.child.id()), Signal::INT);
        let status = wait(&mut self.child);
        assert!(status.success(), "cairn up ended with {status}");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            signal(u64::from(self.child.id()), Signal::TERM);
            let _ = wait(&mut self.child);
        }
    }
}

pub fn signal(pid: u64, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // The process may have ended by itself.
    let _ = kill_process(pid, signal);
}

fn wait(child: &mut Child) -> std::process::ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the process did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs `cairn ARGS` and parses what it prints.
pub fn ask(args: &[&str]) -> Value {
    let output = Command::new(CAIRN).args(args).stdin(Stdio::null()).output().unwrap();
    assert!(
        output.status.success(),
        "cairn {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("cairn {args:?}: {e}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Runs `cairn ARGS`, which must fail; returns what it says.
pub fn refusal(args: &[&str]) -> String {
    let output = Command::new(CAIRN).args(args).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success(), "cairn {args:?} should have failed");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits for a condition, as long as the busiest machine may need.
pub fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    eventually_within(what, PATIENCE, look)
}

/// The same for what takes longer by itself.
pub fn eventually_within<T>(what: &str, within: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(PATIENCE))
        .build()
        .new_agent()
}

/// Posts JSON; returns status and body.
pub fn post(url: &str, body: &Value) -> (u16, Value) {
    let mut response = agent().post(url).send_json(body).unwrap();
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

pub fn get(url: &str) -> (u16, String) {
    let mut response = agent().get(url).call().unwrap();
    (
        response.status().as_u16(),
        response.body_mut().read_to_string().unwrap(),
    )
}

/// Posts a streamed request and returns the events' data lines.
pub fn stream(url: &str, body: &Value) -> Vec<String> {
    open_stream(url, body).collect()
}

/// The same, line by line as they come.
pub fn open_stream(url: &str, body: &Value) -> impl Iterator<Item = String> {
    let response = agent().post(url).send_json(body).unwrap();
    assert_eq!(response.status(), 200);
    let lines = BufReader::new(response.into_body().into_reader()).lines();
    lines
        .map(|l| l.unwrap())
        .filter_map(|l| l.strip_prefix("data: ").map(str::to_owned))
}

/// A chat body; `start` is shared text, `end` the request's own.
pub fn chat(start: &str, end: &str, streamed: bool) -> Value {
    json!({
        "model": "cairn-demo", "stream": streamed, "max_tokens": 8,
        "messages": [{"role": "system", "content": start}, {"role": "user", "content": end}],
    })
}

/// Text of about `words` words that differs for each `seed`.
pub fn prose(seed: u64, words: usize) -> String {
    const WORDS: [&str; 16] = [
        "stone", "path", "river", "north", "wind", "marker", "valley", "summit", "cloud", "trail", "bridge", "snow",
        "lake", "forest", "ridge", "shelter",
    ];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = String::new();
    for _ in 0..words {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.push_str(WORDS[(state % 16) as usize]);
        text.push(' ');
    }
    text
}

/// Sum of a metric over all label sets.
pub fn metric(page: &str, name: &str) -> f64 {
    page.lines()
        .filter(|l| l.starts_with(name) && l[name.len()..].starts_with(['{', ' ']))
        .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// One role as its own process, from a configuration of the test's; killed when dropped.
pub struct RoleProcess {
    pub ready: Value,
    pub log: std::path::PathBuf,
    child: Child,
}

impl RoleProcess {
    /// Starts `cairn ROLE --config` with `config`; files live in `folder`.
    pub fn start(folder: &std::path::Path, name: &str, role: &str, config: &str) -> Self {
        Self::try_start(folder, name, role, config).unwrap_or_else(|said| panic!("{name} did not start: {said}"))
    }

    /// Like [`RoleProcess::start`]; the error is what the process said.
    pub fn try_start(folder: &std::path::Path, name: &str, role: &str, config: &str) -> Result<Self, String> {
        let path = folder.join(format!("{name}.toml"));
        std::fs::write(&path, config).unwrap();
        let log = folder.join(format!("{name}.log"));
        let mut child = Command::new(CAIRN)
            .args([role, "--json", "--config", path.to_str().unwrap()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(
                std::fs::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(&log)
                    .unwrap(),
            )
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        match serde_json::from_str(&line) {
            Ok(ready) => Ok(Self { ready, log, child }),
            Err(_) => {
                let status = wait(&mut child);
                assert!(!status.success(), "{name} ended well without a ready line");
                Err(std::fs::read_to_string(&log).unwrap())
            }
        }
    }

    pub fn pid(&self) -> u64 {
        u64::from(self.child.id())
    }

    /// Kills it at once and reaps it.
    pub fn crash(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to end and waits.
    pub fn end(mut self) -> std::process::ExitStatus {
        signal(self.pid(), Signal::TERM);
        wait(&mut self.child)
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A free port that is nobody else's while this process lives.
pub fn free_port() -> u16 {
    static HELD: Mutex<Vec<HeldPort>> = Mutex::new(Vec::new());
    let held = HeldPort::hold(0).unwrap();
    let port = held.port();
    HELD.lock().unwrap().push(held);
    port
}

/// Says loudly that a test did not run, and why; written past the capture of a passing test's output.
pub fn skipped(test: &str, set: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: set {set}");
}
