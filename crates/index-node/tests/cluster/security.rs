//! A cluster with token and TLS works, and lets nobody else in.

use cairn_proto::security::Security;
use cairn_proto::v1;

use crate::harness::{Cluster, PATIENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_with_token_and_tls_form_a_cluster_and_refuse_strangers() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    let cert = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let security = Security {
        cluster_token_file: write("token", "a-token-of-more-than-16-characters"),
        tls_cert_file: write("cert", &cert.cert.pem()),
        tls_key_file: write("key", &cert.signing_key.serialize_pem()),
        tls_ca_file: write("ca", &cert.cert.pem()),
    };
    let forming = Cluster::start_with(3, |config| config.security = security.clone());
    let cluster = tokio::time::timeout(PATIENCE, forming).await.unwrap();
    cluster.agree().await;
    let ask = |security: Security| {
        let address = cluster.address(0);
        async move {
            let channel = security.load().unwrap().client_channel(&address).unwrap();
            v1::admin_client::AdminClient::new(channel)
                .members(v1::MembersRequest {})
                .await
        }
    };
    assert_eq!(ask(security.clone()).await.unwrap().into_inner().members.len(), 3);
    let no_token = Security {
        cluster_token_file: None,
        ..security.clone()
    };
    assert_eq!(ask(no_token).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    ask(Security::default()).await.unwrap_err();
}
