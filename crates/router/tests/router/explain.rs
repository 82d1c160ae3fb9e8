//! What operators are told of a request that isn't sent.

use cairn_router::{Config, PoolConfig};
use cairn_tokens::{ChatRequest, LoadOptions, ModelTokens};
use serde_json::{Value, json};

use super::client::{post, send};
use super::routing::World;

async fn told(world: &World, pool: PoolConfig, body: &Value) -> Value {
    let router = world
        .router_with(Config {
            pool: vec![pool],
            ..world.config()
        })
        .await;
    let answer = send(router.addr, post("/cairn/explain?token_ids=true", body.to_string())).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn ids(options: LoadOptions, body: &Value) -> Value {
    let tokens = ModelTokens::embedded_with(options).unwrap();
    let ids = match body["prompt"].as_str() {
        Some(text) => tokens.encode_prompt(text, body["add_special_tokens"] != false).unwrap(),
        None => tokens.encode_chat(&ChatRequest::from_body(body).unwrap()).unwrap().ids,
    };
    json!([ids])
}

#[tokio::test]
async fn token_ids_are_those_of_engines_started_with_a_template_and_variables_of_their_own() {
    let world = World::start(1).await;
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "What is it?"}]});
    let text = json!({"model": "m", "prompt": "What is it?"});
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.jinja");
    // Python reads text files with any line ends.
    std::fs::write(
        &file,
        "{{ tone }}:\r\n{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    )
    .unwrap();
    let kwargs = json!({"tone": "calm"}).as_object().cloned().unwrap();
    let own = PoolConfig {
        name: "m".into(),
        chat_template: file.display().to_string(),
        default_chat_template_kwargs: kwargs.clone(),
        ..PoolConfig::default()
    };
    let same = LoadOptions {
        chat_template: Some("{{ tone }}:\n{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}".into()),
        default_chat_template_kwargs: kwargs,
        ..LoadOptions::default()
    };
    let plain = PoolConfig {
        name: "m".into(),
        ..PoolConfig::default()
    };
    let by_default = ids(LoadOptions::default(), &chat);
    assert_ne!(by_default, ids(same.clone(), &chat));
    assert_eq!(told(&world, plain.clone(), &chat).await["token_ids"], by_default);
    assert_eq!(told(&world, own.clone(), &chat).await["token_ids"], ids(same, &chat));
    assert_eq!(
        told(&world, own, &text).await["token_ids"],
        ids(LoadOptions::default(), &text)
    );

    let router = world.router().await;
    let answer = send(router.addr, post("/cairn/explain", chat.to_string())).await.json();
    assert!(answer.get("token_ids").is_none(), "{answer}");
    let answer = send(router.addr, post("/cairn/explain?token_ids=maybe", chat.to_string())).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (400, "invalid_value")
    );
}

#[tokio::test]
async fn a_requests_own_template_counts_only_where_its_engines_trust_it() {
    let world = World::start(1).await;
    let template = "{{ messages[0].content }} indeed";
    let messages = json!([{"role": "user", "content": "It is"}]);
    let chat = json!({"model": "m", "messages": messages, "chat_template": template});
    let pool = |trust| PoolConfig {
        name: "m".into(),
        trust_request_chat_template: trust,
        ..PoolConfig::default()
    };
    let by_text = json!({"prompt": "It is indeed", "add_special_tokens": false});
    let trusted = told(&world, pool(true), &chat).await;
    assert_eq!(trusted["token_ids"], ids(LoadOptions::default(), &by_text));
    assert_eq!(trusted["degraded"], Value::Null);
    // The engine will refuse it with its own words, so the router only finds one that says so.
    let refused = told(&world, pool(false), &chat).await;
    assert_eq!(
        (&refused["token_ids"], &refused["degraded"]),
        (&json!([]), &json!("template"))
    );
}
