//! The bind rule, the token and TLS over real sockets.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::PathBuf;

use cairn_proto::security::{Security, SecurityError, Token};
use cairn_proto::v1;
use tonic::{Request, Response, Status};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct Files {
    _dir: tempfile::TempDir,
    security: Security,
}

fn write(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn full() -> Files {
    let dir = tempfile::tempdir().unwrap();
    let cert = rcgen::generate_simple_self_signed(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let pem = cert.cert.pem();
    let security = Security {
        cluster_token_file: Some(write(&dir, "token", &format!("{TOKEN}\n"))),
        tls_cert_file: Some(write(&dir, "cert.pem", &pem)),
        tls_key_file: Some(write(&dir, "key.pem", &cert.signing_key.serialize_pem())),
        tls_ca_file: Some(write(&dir, "ca.pem", &pem)),
    };
    Files { _dir: dir, security }
}

struct Echo;

#[tonic::async_trait]
impl v1::raft_server::Raft for Echo {
    async fn append(&self, request: Request<v1::RaftMessage>) -> Result<Response<v1::RaftMessage>, Status> {
        Ok(Response::new(request.into_inner()))
    }
    async fn vote(&self, request: Request<v1::RaftMessage>) -> Result<Response<v1::RaftMessage>, Status> {
        Ok(Response::new(request.into_inner()))
    }
    async fn snapshot(
        &self,
        _request: Request<tonic::Streaming<v1::RaftMessage>>,
    ) -> Result<Response<v1::RaftMessage>, Status> {
        Err(Status::unimplemented("not part of this test"))
    }
    async fn probe(&self, _request: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeReply>, Status> {
        Err(Status::unimplemented("not part of this test"))
    }
}

async fn serve(security: &Security) -> std::net::SocketAddr {
    let credentials = security.load().unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = v1::raft_server::RaftServer::with_interceptor(Echo, credentials.server_auth());
    let server = credentials.server_builder().unwrap().add_service(service);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

async fn call(security: &Security, address: &str) -> Result<(), Status> {
    let channel = security.load().unwrap().client_channel(address).unwrap();
    let mut client = v1::raft_client::RaftClient::new(channel);
    client.append(v1::RaftMessage { payload: "x".into() }).await.map(|_| ())
}

#[test]
fn loopback_needs_nothing_and_other_addresses_need_token_and_tls() {
    let open = Security::default();
    for address in ["127.0.0.1:80", "127.9.9.9:0", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
        open.check_bind(address.parse().unwrap()).unwrap();
    }
    for address in ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "[::ffff:10.0.0.1]:1"] {
        let message = open.check_bind(address.parse().unwrap()).unwrap_err().to_string();
        for word in ["cluster_token_file", "tls_cert_file", "tls_key_file", "127.0.0.1"] {
            assert!(message.contains(word), "{message} should name {word}");
        }
        let only_token = Security {
            cluster_token_file: Some("t".into()),
            ..Security::default()
        };
        let message = only_token.check_bind(address.parse().unwrap()).unwrap_err().to_string();
        assert!(
            !message.contains("cluster_token_file") && message.contains("tls_cert_file"),
            "{message}"
        );
        full().security.check_bind(address.parse().unwrap()).unwrap();
    }
}

#[tokio::test]
async fn calls_beyond_loopback_without_token_and_tls_are_refused() {
    let open = Security::default().load().unwrap();
    for address in ["10.1.2.3:7100", "http://index-0.cairn:7100", "[2001:db8::1]:7100"] {
        let error = open.client_channel(address).unwrap_err();
        assert!(matches!(error, SecurityError::OpenCall { .. }), "{error}");
    }
    for address in ["127.0.0.1:1", "localhost:7100", "http://[::1]:7100/"] {
        open.client_channel(address).unwrap();
    }
    for address in ["", "127.0.0.1", "nonsense host:1", "127.0.0.1:0"] {
        assert!(
            matches!(open.client_channel(address).unwrap_err(), SecurityError::Address { .. }),
            "{address}"
        );
    }
}

#[test]
fn half_a_tls_setup_and_unreadable_files_are_named() {
    let files = full();
    let half = Security {
        tls_key_file: None,
        ..files.security.clone()
    };
    assert!(half.validate().unwrap_err().to_string().contains("tls_key_file"));
    let absent = Security {
        cluster_token_file: Some("/nonexistent/token".into()),
        ..Security::default()
    };
    let message = absent.load().unwrap_err().to_string();
    assert!(
        message.contains("/nonexistent/token") && message.contains("cluster_token_file"),
        "{message}"
    );
    let dir = tempfile::tempdir().unwrap();
    for (text, word) in [
        ("short", "at least"),
        ("0123456789 abcdef0123", "white space"),
        ("", "at least"),
    ] {
        let error = Token::from_file(&write(&dir, "token", text)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert!(
            text.is_empty() || !error.contains(text),
            "the content stays secret: {error}"
        );
    }
    let swapped = Security {
        tls_cert_file: files.security.tls_key_file.clone(),
        ..files.security.clone()
    };
    assert!(swapped.load().unwrap_err().to_string().contains("tls_cert_file"));
}

#[test]
fn a_token_is_compared_whole_and_never_printed() {
    let dir = tempfile::tempdir().unwrap();
    let token = Token::from_file(&write(&dir, "token", TOKEN)).unwrap();
    assert!(token.matches(TOKEN.as_bytes()));
    for wrong in [
        "",
        "0",
        &TOKEN[1..],
        &format!("{TOKEN}0"),
        &format!("{TOKEN}{TOKEN}"),
        &TOKEN.replace('f', "e"),
    ] {
        assert!(!token.matches(wrong.as_bytes()), "{wrong}");
    }
    assert!(token.matches_header(format!("bearer {TOKEN}").as_bytes()));
    assert!(!token.matches_header(TOKEN.as_bytes()));
    assert!(!format!("{token:?}").contains("0123"));
}

#[tokio::test]
async fn a_port_with_token_and_tls_answers_only_those_who_have_both() {
    let files = full();
    let address = serve(&files.security).await;
    let named = format!("localhost:{}", address.port());
    call(&files.security, &named).await.unwrap();

    let no_token = Security {
        cluster_token_file: None,
        ..files.security.clone()
    };
    let status = call(&no_token, &named).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);
    assert!(status.message().contains("cluster_token_file"), "{status}");

    let dir = tempfile::tempdir().unwrap();
    let other = write(&dir, "token", "another token".repeat(2).replace(' ', "-").as_str());
    let wrong_token = Security {
        cluster_token_file: Some(other),
        ..files.security.clone()
    };
    assert_eq!(
        call(&wrong_token, &named).await.unwrap_err().code(),
        tonic::Code::Unauthenticated
    );

    let no_tls = Security {
        tls_ca_file: None,
        tls_cert_file: None,
        tls_key_file: None,
        ..files.security.clone()
    };
    call(&no_tls, &named).await.unwrap_err();
    let stranger = full();
    let wrong_ca = Security {
        tls_ca_file: stranger.security.tls_ca_file.clone(),
        ..files.security.clone()
    };
    call(&wrong_ca, &named).await.unwrap_err();
}

#[tokio::test]
async fn loopback_without_settings_is_open() {
    let open = Security::default();
    let address = serve(&open).await;
    call(&open, &address.to_string()).await.unwrap();
}
