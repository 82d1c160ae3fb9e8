//! Token and TLS towards the index.

use cairn_agent::EngineConfig;
use cairn_proto::security::Security;

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::FakeIndex;
use crate::{config, gpu, hashes, tokens, until};

/// Files of a cluster with its own authority.
fn files(dir: &std::path::Path) -> Security {
    let authority = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into(), "localhost".into()]).unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    Security {
        cluster_token_file: write("token", "0123456789abcdef0123456789abcdef"),
        tls_cert_file: write("cert.pem", &authority.cert.pem()),
        tls_key_file: write("key.pem", &authority.signing_key.serialize_pem()),
        tls_ca_file: write("ca.pem", &authority.cert.pem()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_is_spoken_to_over_tls_with_the_cluster_token_and_not_without() {
    let secrets = tempfile::tempdir().unwrap();
    let security = files(secrets.path());
    let index = FakeIndex::start_secured(&security).await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut good = config(&index, vec![EngineConfig::at(&engine.url())], dir.path());
    good.security = security.clone();
    let running = cairn_agent::start(good).await.unwrap();
    until("ready", || running.ready().is_ok() && !running.sources().is_empty()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    until("load", || index.world.lock().loads.contains_key(&source)).await;
    running.stop().await;

    let mut wrong = config(&index, vec![EngineConfig::at(&engine.url())], other.path());
    std::fs::write(other.path().join("wrong"), "ffffffffffffffffffffffffffffffff").unwrap();
    wrong.security = Security {
        cluster_token_file: Some(other.path().join("wrong")),
        ..security
    };
    let before = index.world.lock().registrations.len();
    let refused = cairn_agent::start(wrong).await.unwrap();
    until("the engine to be found", || !refused.sources().is_empty()).await;
    until("several polls", || engine.answers.lock().requests.len() > 60).await;
    assert!(refused.ready().is_err());
    assert_eq!(index.world.lock().registrations.len(), before);
}
