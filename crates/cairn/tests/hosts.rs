//! What crosses hosts: every port with token and TLS, and a request split between a prefill and a decode engine.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use support::watch::Watch;
use support::{RoleProcess, ask, eventually, free_port, post, prose, refusal};

/// A certificate authority, a host certificate and a token in files.
struct Secrets {
    token: PathBuf,
    ca: PathBuf,
    section: String,
}

fn secrets(folder: &Path) -> Secrets {
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let authority_cert = authority.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let host_key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let host = rcgen::CertificateParams::new(names)
        .unwrap()
        .signed_by(&host_key, &issuer)
        .unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let token = write("token", "a-token-that-only-this-cluster-knows");
    let ca = write("ca.pem", &authority_cert.pem());
    let cert = write("host.pem", &host.pem());
    let key = write("host.key", &host_key.serialize_pem());
    let section = format!(
        "\n[security]\ncluster_token_file = {token:?}\ntls_cert_file = {cert:?}\ntls_key_file = {key:?}\ntls_ca_file = {ca:?}\n"
    );
    Secrets { token, ca, section }
}

fn index_config(folder: &Path, listen: &str, port: u16) -> String {
    let data = folder.join("index");
    format!(
        "cluster = \"hosts\"\nlisten = \"{listen}:{port}\"\nadvertise = \"127.0.0.1:{port}\"\ndata_dir = {data:?}\n"
    )
}

#[test]
fn a_cluster_beyond_loopback_runs_on_token_and_tls() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let secrets = secrets(at);
    let (index_port, router_port, engine_port, ops_port) = (free_port(), free_port(), free_port(), free_port());
    let engine = format!(
        "listen = \"127.0.0.1:{engine_port}\"\n[timing]\nspeed = 0.0\n[events]\nendpoint = \"tcp://127.0.0.1:0\"\nreplay_endpoint = \"tcp://127.0.0.1:0\"\n"
    );
    let _engine = RoleProcess::start(at, "engine", "engine", &engine);
    let _index = RoleProcess::start(
        at,
        "index",
        "index",
        &format!(
            "{}ops_listen = \"0.0.0.0:{ops_port}\"\n{}",
            index_config(at, "0.0.0.0", index_port),
            secrets.section
        ),
    );
    let data = at.join("agent");
    let agent = format!(
        "data_dir = {data:?}\nindex = [\"https://127.0.0.1:{index_port}\"]\n[[engine]]\nurl = \"http://127.0.0.1:{engine_port}\"\n"
    );
    let _agent = RoleProcess::start(at, "agent", "agent", &(agent + &secrets.section));
    let router = format!("listen = \"0.0.0.0:{router_port}\"\nindex = [\"https://127.0.0.1:{index_port}\"]\n");
    let _router = RoleProcess::start(at, "router", "router", &(router + &secrets.section));

    let index = format!("127.0.0.1:{index_port}");
    let status = eventually("the worker is exact", || {
        let status = ask(&[
            "status",
            "--json",
            "--index",
            &index,
            "--cluster-token",
            secrets.token.to_str().unwrap(),
            "--tls-ca",
            secrets.ca.to_str().unwrap(),
        ]);
        (status["workers"][0]["exact"] == true).then_some(status)
    });
    assert_eq!(status["cluster"], "hosts");
    let said = refusal(&["status", "--index", &index, "--tls-ca", secrets.ca.to_str().unwrap()]);
    assert!(said.contains("token"), "{said}");
    let said = refusal(&[
        "status",
        "--index",
        &index,
        "--cluster-token",
        secrets.token.to_str().unwrap(),
    ]);
    assert!(!said.contains("panicked") && said.contains(&index), "{said}");
    let token = std::fs::read_to_string(&secrets.token).unwrap();
    for (path, sent, answer) in [
        ("/live", None, "HTTP/1.1 200"),
        ("/metrics", None, "HTTP/1.1 401"),
        ("/metrics", Some("another-token-of-some-length"), "HTTP/1.1 401"),
        ("/metrics", Some(&*token), "HTTP/1.1 200"),
    ] {
        let answered = get_over_tls(ops_port, &secrets.ca, path, sent);
        assert!(answered.starts_with(answer), "{path}: {answered}");
    }
    let mut plain = TcpStream::connect(("127.0.0.1", ops_port)).unwrap();
    plain.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answered = Vec::new();
    // The other side may reset the connection instead of closing it.
    let _ = plain.read_to_end(&mut answered);
    assert!(!answered.starts_with(b"HTTP"), "without TLS the port answered");
    for log in ["index", "agent", "router"] {
        let text = std::fs::read_to_string(at.join(format!("{log}.log"))).unwrap();
        assert!(!text.contains("a-token-that-only"), "the token is in the {log}'s log");
    }
}

/// The answer of a port that speaks TLS, as text.
fn get_over_tls(port: u16, ca: &Path, path: &str, token: Option<&str>) -> String {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, TcpStream::connect(("127.0.0.1", port)).unwrap());
    let authorization = token.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"));
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{authorization}\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    // Some servers close without TLS's own farewell.
    let _ = stream.read_to_string(&mut answer);
    answer
}

fn engine(folder: &Path, name: &str) -> (RoleProcess, String) {
    let port = free_port();
    let config = format!(
        "listen = \"127.0.0.1:{port}\"\nmax_model_len = 16384\n[timing]\nspeed = 5.0\n\
         [events]\nendpoint = \"tcp://127.0.0.1:0\"\nreplay_endpoint = \"tcp://127.0.0.1:0\"\n\
         [transfer]\nenabled = true\nlisten = \"127.0.0.1:0\"\n"
    );
    (
        RoleProcess::start(folder, name, "engine", &config),
        format!("http://127.0.0.1:{port}"),
    )
}

#[test]
fn a_split_request_returns_what_one_engine_returns_and_a_dead_prefill_engine_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let (index_port, router_port) = (free_port(), free_port());
    let (prefill, prefill_url) = engine(at, "prefill");
    let (_decode, decode_url) = engine(at, "decode");
    let _index = RoleProcess::start(at, "index", "index", &index_config(at, "127.0.0.1", index_port));
    let data = at.join("agent");
    let agent = format!(
        "data_dir = {data:?}\nindex = [\"http://127.0.0.1:{index_port}\"]\n\
         [[engine]]\nurl = \"{prefill_url}\"\nrole = \"prefill\"\n[[engine]]\nurl = \"{decode_url}\"\nrole = \"decode\"\n"
    );
    let _agent = RoleProcess::start(at, "agent", "agent", &agent);
    let router = format!("listen = \"127.0.0.1:{router_port}\"\nindex = [\"http://127.0.0.1:{index_port}\"]\n");
    let _router = RoleProcess::start(at, "router", "router", &router);
    let router = format!("http://127.0.0.1:{router_port}");
    eventually("both workers are known and fit", || {
        let status: Value = serde_json::from_str(&support::get(&format!("{router}/cairn/status")).1).ok()?;
        let workers = status["workers"].as_array()?;
        (workers.len() == 2 && workers.iter().all(|w| w["eligible"] == true)).then_some(())
    });
    let models: Value = serde_json::from_str(&support::get(&format!("{router}/v1/models")).1).unwrap();
    let model = models["data"][0]["id"].as_str().unwrap();
    let other = json!({"model": model, "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": prose(78, 3_000)}]});
    let (status, expected) = post(&format!("{prefill_url}/v1/chat/completions"), &other);
    assert_eq!(status, 200, "{expected}");
    // The prefill engine holds the prompt now: moving its blocks is cheaper than computing them on the decode engine.
    let file = at.join("body.json");
    std::fs::write(&file, other.to_string()).unwrap();
    eventually("a split pays", || {
        let decision = ask(&[
            "explain",
            "--router",
            &router,
            "--json",
            "--body",
            file.to_str().unwrap(),
        ]);
        (!decision["decode"].is_null()).then_some(())
    });
    let (status, split) = post(&format!("{router}/v1/chat/completions"), &other);
    assert_eq!(status, 200, "{split}");
    assert_eq!(
        split["choices"][0]["message"]["content"],
        expected["choices"][0]["message"]["content"]
    );
    let last = ask(&["explain", "--router", &router, "--last", "--json"]);
    assert!(last["chosen"].as_str().unwrap().starts_with(&prefill_url), "{last}");
    assert!(last["decode"].as_str().unwrap().starts_with(&decode_url), "{last}");

    prefill.crash();
    let third = json!({"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": prose(79, 3_000)}]});
    let asked = Watch::start();
    let (status, answer) = post(&format!("{router}/v1/chat/completions"), &third);
    assert_eq!(status, 200, "the decode engine takes it whole: {answer}");
    asked.within(Duration::from_secs(10), "an answer although one leg is dead");
    eventually("nothing is reserved any more", || {
        let status: Value = serde_json::from_str(&support::get(&format!("{router}/cairn/status")).1).ok()?;
        (status["reservations"] == 0).then_some(())
    });
}
