//! Chats are rendered as engines render them.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_tokens::{ChatError, ChatRequest, LoadOptions, ModelTokens, PromptEnd, WallClock};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// The embedded tokenizer, with templates from requests allowed.
fn trusting() -> &'static ModelTokens {
    static TOKENS: OnceLock<ModelTokens> = OnceLock::new();
    TOKENS.get_or_init(|| {
        let options = LoadOptions {
            trust_request_chat_template: true,
            ..LoadOptions::default()
        };
        ModelTokens::embedded_with(options).unwrap()
    })
}

fn render(body: &Value) -> Result<String, ChatError> {
    trusting().render_chat(&ChatRequest::from_body(body)?).map(|r| r.text)
}

fn render_with(template: &str, messages: Value) -> Result<String, ChatError> {
    render(&json!({"messages": messages, "chat_template": template}))
}

const LOOP: &str = "{% for m in messages %}{% for c in m.content %}{{ c | tojson }};{% endfor %}{% endfor %}";
const DUMP: &str = "{{ messages | tojson }}";

#[test]
fn content_as_a_string_and_as_a_list_of_text_parts_give_the_same_ids() {
    let ids = |content: Value| {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        trusting()
            .encode_chat(&ChatRequest::from_body(&body).unwrap())
            .unwrap()
            .ids
    };
    assert_eq!(
        ids(json!("caf\u{e9} \u{1f642}")),
        ids(json!([{"type": "text", "text": "caf\u{e9} \u{1f642}"}]))
    );
    assert_eq!(
        ids(json!("a\nb")),
        ids(json!(["a", {"type": "input_text", "text": "b"}]))
    );
}

#[test]
fn key_order_and_white_space_of_the_body_change_nothing() {
    let ids = |text: &str| {
        let body: Value = serde_json::from_str(text).unwrap();
        trusting()
            .encode_chat(&ChatRequest::from_body(&body).unwrap())
            .unwrap()
            .ids
    };
    let tools = r#""tools":[{"function":{"parameters":{"type":"object"},"name":"f"},"type":"function"}]"#;
    let same = r#"{ "tools" : [ {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}} ],
        "messages": [ {"content": "hi", "role": "user", "unknown": 1} ], "model": "x" }"#;
    assert_eq!(
        ids(&format!(r#"{{"messages":[{{"role":"user","content":"hi"}}],{tools}}}"#)),
        ids(same)
    );
}

#[test]
fn templates_that_loop_over_content_get_parts_and_others_get_text() {
    let check = |template: &str, content: Value, expect: &str| {
        let got = render_with(template, json!([{"role": "user", "content": content}])).unwrap();
        assert_eq!(got, expect, "{template}");
    };
    let parts =
        || json!([{"type": "text", "text": "p1"}, "plain", {"type": "text", "text": "p2", "cache_control": {"x": 1}}]);
    check(
        LOOP,
        parts(),
        r#"{"type": "text", "text": "p1"};{"type": "text", "text": "plain"};{"type": "text", "text": "p2", "cache_control": {"x": 1}};"#,
    );
    check(LOOP, json!("s"), r#"{"type": "text", "text": "s"};"#);
    check("{{ messages[0].content }}", parts(), "p1\nplain\np2");
    check("{{ messages[0].content }}", json!([]), "");
    // Through assignments, slices, filters, macros and item access.
    for template in [
        "{% set all = messages[1:] %}{% for x in all | list %}{% for c in x['content'] %}{% endfor %}{% endfor %}{{ messages[0].content is string }}",
        "{% macro show(what) %}{% for c in what %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}{{ messages[0].content is string }}",
        "{% macro show(a, what) %}{% for c in what %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(what=m.content, a=1) }}{% endfor %}{{ messages[0].content is string }}",
        "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}{{ messages[0].content is string }}",
    ] {
        check(template, json!("s"), "False");
    }
    for template in [
        "{% for m in messages %}{% for c in m.other %}{% endfor %}{% endfor %}{{ messages[0].content is string }}",
        "{% macro show(what) %}{% for c in what %}{% endfor %}{% endmacro %}{{ messages[0].content is string }}",
    ] {
        check(template, json!("s"), "True");
    }
}

#[test]
fn tool_calls_reach_the_template_as_objects_in_the_engines_order() {
    let call = json!([{"zed": 1, "type": "function", "function": {"zip": 2, "name": "f", "arguments": "{\"b\": 1, \"a\": 2.0}"}, "id": "x"}]);
    let got = render_with(
        DUMP,
        json!([{"role": "assistant", "content": null, "tool_calls": call, "reasoning": "r"}]),
    )
    .unwrap();
    assert_eq!(
        got,
        r#"[{"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"arguments": {"b": 1, "a": 2.0}, "name": "f", "zip": 2}, "type": "function", "zed": 1}], "reasoning": "r", "reasoning_content": "r"}]"#
    );
    for arguments in ["", "not json", "[1]", "null"] {
        let call = json!([{"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let got = render_with(DUMP, json!([{"role": "assistant", "tool_calls": call}])).unwrap();
        assert!(got.contains(r#""arguments": {}"#), "{arguments}: {got}");
    }
    let none = render_with(DUMP, json!([{"role": "assistant", "content": "a", "tool_calls": []}])).unwrap();
    assert_eq!(none, r#"[{"role": "assistant", "content": "a"}]"#);
}

#[test]
fn tools_are_printed_with_the_engines_defaults_and_without_unknown_fields() {
    let tools = json!([
        {"function": {"parameters": {"type": "object", "d": "<\u{e9}&'>"}, "name": "f", "extra": 1}, "type": "function", "foo": 1},
        {"type": "function", "function": {"name": "g", "strict": true, "description": "d"}}]);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "chat_template": "{{ tools | tojson }}"});
    assert_eq!(
        render(&body).unwrap(),
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": null, \"parameters\": {\"type\": \"object\", \"d\": \"<\u{e9}&'>\"}}}, {\"type\": \"function\", \"function\": {\"name\": \"g\", \"description\": \"d\", \"parameters\": null, \"strict\": true}}]"
    );
}

#[test]
fn developer_messages_become_one_first_system_message_where_the_template_knows_none() {
    let messages = || {
        json!([
        {"role": "user", "content": "u"}, {"role": "developer", "content": "dev"}, {"role": "system", "content": "sys"}])
    };
    let got = render_with(DUMP, messages()).unwrap();
    assert_eq!(
        got,
        r#"[{"role": "system", "content": "dev\n\nsys"}, {"role": "user", "content": "u"}]"#
    );
    let knows = "{% if messages[1].role == 'developer' %}{{ messages[1].role }}{% endif %}";
    assert_eq!(render_with(knows, messages()).unwrap(), "developer");
}

#[test]
fn a_final_message_is_left_open_where_the_request_asks_for_it() {
    let open = |template: &str, content: Value| {
        render(
            &json!({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": content}],
            "chat_template": template, "continue_final_message": true, "add_generation_prompt": false}),
        )
    };
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
    assert_eq!(
        open(plain, json!("so far, ")).unwrap(),
        "<user>u</s><assistant>so far, "
    );
    let trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}";
    assert_eq!(open(trims, json!("so far, ")).unwrap(), "<user>u</s><assistant>so far,");
    let parts = open(
        LOOP,
        json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    )
    .unwrap();
    assert!(parts.ends_with(r#"{"type": "text", "text": "b"#), "{parts}");
    let drops = open("{{ messages[0].content }}", json!("gone"))
        .unwrap_err()
        .to_string();
    assert!(drops.contains("continue_final_message"), "{drops}");
    let both = json!({"messages": [{"role": "user", "content": "u"}], "continue_final_message": true});
    let both = render(&both).unwrap_err().to_string();
    assert!(both.contains("add_generation_prompt"), "{both}");
}

#[test]
fn keyword_arguments_reach_the_template_as_the_engine_passes_them() {
    let kwargs =
        json!({"a": null, "b": "auto", "c": 0, "padding": true, "bos_token": "B", "documents": [{"text": "t"}]});
    let template = "{{ a is defined }}{{ b is defined }}{{ c }}{{ padding is defined }}{{ bos_token }}{{ documents }}{{ tools }}{{ add_generation_prompt }}";
    let body = json!({"messages": [{"role": "user", "content": "x"}], "chat_template": template, "chat_template_kwargs": kwargs});
    assert_eq!(render(&body).unwrap(), "FalseFalse0FalseB[{'text': 't'}]NoneTrue");
    let effort = |effort: &str, own: Value| {
        render(&json!({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort, "chat_template_kwargs": own,
            "chat_template": "{{ reasoning_effort }}{{ enable_thinking }}"})).unwrap()
    };
    assert_eq!(effort("high", json!({})), "highTrue");
    assert_eq!(effort("none", json!(null)), "noneFalse");
    assert_eq!(effort("low", json!({"enable_thinking": false})), "lowFalse");
}

#[test]
fn the_clock_of_strftime_now_is_the_one_given() {
    let now = chrono::NaiveDate::from_ymd_opt(2026, 2, 3)
        .unwrap()
        .and_hms_opt(4, 5, 6)
        .unwrap();
    let options = LoadOptions {
        chat_template: Some("{{ strftime_now('%d %b %Y') }}".to_owned()),
        clock: WallClock(Arc::new(move || now)),
        ..LoadOptions::default()
    };
    let tokens = ModelTokens::embedded_with(options).unwrap();
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    assert_eq!(
        tokens
            .render_chat(&ChatRequest::from_body(&body).unwrap())
            .unwrap()
            .text,
        "03 Feb 2026"
    );
}

#[test]
fn named_templates_are_chosen_by_tools_and_a_request_template_needs_permission() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("tokenizer.json"),
        include_str!("../assets/tokenizer.json"),
    )
    .unwrap();
    let config = json!({"bos_token": {"content": "<|startoftext|>"}, "chat_template": [
        {"name": "default", "template": "plain{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "{{ broken"}]});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokens = ModelTokens::load(dir.path(), LoadOptions::default()).unwrap();
    let text = |body: &Value| {
        tokens
            .render_chat(&ChatRequest::from_body(body).unwrap())
            .map(|r| r.text)
    };
    let messages = json!([{"role": "user", "content": "x"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(text(&json!({"messages": messages})).unwrap(), "plain<|startoftext|>");
    assert_eq!(text(&json!({"messages": messages, "tools": tools})).unwrap(), "tools");
    let own = text(&json!({"messages": messages, "chat_template": "{{ 1 }}"})).unwrap_err();
    assert_eq!(own, ChatError::RequestTemplateRefused);
    let hidden =
        text(&json!({"messages": messages, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}})).unwrap_err();
    assert_eq!(hidden, ChatError::RequestTemplateRefused);
    std::fs::write(dir.path().join("chat_template.jinja"), "from a file").unwrap();
    let tokens = ModelTokens::load(dir.path(), LoadOptions::default()).unwrap();
    let body = json!({"messages": messages, "tools": tools});
    assert_eq!(
        tokens
            .render_chat(&ChatRequest::from_body(&body).unwrap())
            .unwrap()
            .text,
        "from a file"
    );
}

#[test]
fn text_before_the_first_image_is_exact_and_the_rest_is_left_to_the_engine() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}<think>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}";
    let image = json!({"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}});
    let body = |content: Value| json!({"messages": [{"role": "system", "content": "Look closely."}, {"role": "user", "content": content}], "chat_template": template});
    let encode = |body: &Value| trusting().encode_chat(&ChatRequest::from_body(body).unwrap()).unwrap();
    let whole = encode(&body(
        json!([{"type": "text", "text": "What is this? "}, {"type": "text", "text": "And this?"}]),
    ));
    let media = encode(&body(
        json!([{"type": "text", "text": "What is this? "}, image, {"type": "text", "text": "And this?"}]),
    ));
    assert_eq!(media.end, PromptEnd::Media);
    let text = trusting().decode(&media.ids, false).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nLook closely.<|im_end|>\n<|im_start|>user\nWhat is this? "
    );
    assert!(whole.ids.len() > media.ids.len());
    // A template that takes plain text: where the engine puts the image isn't known, so the message itself is left out.
    let plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let mut request = body(json!([{"type": "text", "text": "What is this? "}, image]));
    request["chat_template"] = plain.into();
    let media = encode(&request);
    assert_eq!(media.end, PromptEnd::Media);
    let text = trusting().decode(&media.ids, false).unwrap();
    assert!(
        text.starts_with("<|im_start|>system\nLook closely.<|im_end|>\n<|im_start|>") && !text.contains("What"),
        "{text}"
    );
}

#[test]
fn hostile_templates_run_out_of_work_soon_and_deep_input_is_no_panic() {
    let started = std::time::Instant::now();
    for template in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}x{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 'a'.rjust(4000000000) }}",
        "{{ ('a' * 1000000).replace('', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb' * 1000) }}",
        &format!("{{{{ {}1{} }}}}", "(".repeat(5_000), ")".repeat(5_000)),
        &"{% if true %}".repeat(3_000),
        &"x".repeat(1 << 20),
    ] {
        let refused = render_with(template, json!([{"role": "user", "content": "x"}])).unwrap_err();
        let name: String = template.chars().take(40).collect();
        assert!(
            matches!(refused, ChatError::TooMuchWork | ChatError::Template { .. }),
            "{name}: {refused:?}"
        );
    }
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    let mut deep = json!(1);
    for _ in 0..120 {
        deep = json!([deep]);
    }
    let body = json!({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ deep | tojson }}", "chat_template_kwargs": {"deep": deep}});
    let _ = render(&body);
}

#[test]
fn wrong_shapes_are_refused_with_the_field_and_the_remedy() {
    for (body, field) in [
        (json!([]), "body"),
        (json!({}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": ["hi"]}), "messages"),
        (json!({"messages": [{"content": "x"}]}), "messages"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages"),
        (json!({"messages": [{"role": "user", "content": [5]}]}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
            "messages",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}),
            "messages",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [5]}]}),
            "messages",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "tools": {}}),
            "tools",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
            "tools",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": []}),
            "chat_template_kwargs",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": "yes"}),
            "add_generation_prompt",
        ),
    ] {
        let refused = render(&body).unwrap_err().to_string();
        assert!(refused.starts_with(field), "{body}: {refused}");
    }
}

#[test]
fn a_template_error_never_quotes_the_conversation() {
    let canary = "canary-8d1f";
    for template in [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | nofilter }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content.nope() }}",
    ] {
        let refused = render_with(template, json!([{"role": "user", "content": canary}])).unwrap_err();
        assert!(
            !refused.to_string().contains(canary) && !format!("{refused:?}").contains(canary),
            "{refused:?}"
        );
    }
}

#[test]
fn no_cut_of_wide_characters_panics() {
    let wide = "\u{d7}\u{1f642}\u{4f60}\u{e9}";
    for n in (0..40).chain(500..530) {
        let text = format!("{}{}", "x".repeat(n), wide.repeat(300));
        let ids = trusting().encode_prompt(&text, false).unwrap();
        assert_eq!(trusting().decode(&ids, false).unwrap(), text);
        let spaced = format!("{}{}", "x".repeat(n), format!("{wide} ").repeat(300));
        let ids = trusting().encode_prompt(&spaced, false).unwrap();
        assert_eq!(trusting().decode(&ids, false).unwrap(), spaced);
    }
}

#[test]
fn a_lone_surrogate_is_refused_by_the_json_parser_every_time() {
    for text in [
        r#"{"content":"\ud83e"}"#,
        r#"{"content":"\ud83e x"}"#,
        r#"{"content":"\udd14"}"#,
        r#"{"content":"\ud83e\u0041"}"#,
    ] {
        for _ in 0..3 {
            assert!(serde_json::from_str::<Value>(text).is_err(), "{text}");
        }
    }
    assert!(serde_json::from_str::<Value>(r#"{"content":"\ud83e\udd14"}"#).is_ok());
}
