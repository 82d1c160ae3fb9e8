//! Conversations of nothing but roles and texts render alike from pieces and by the template.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_tokens::{ChatRequest, LoadOptions, ModelTokens, PlainMessage};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

fn with_template(source: &str) -> ModelTokens {
    ModelTokens::embedded_with(LoadOptions {
        chat_template: Some(source.to_owned()),
        ..LoadOptions::default()
    })
    .unwrap()
}

fn recorded(name: &str) -> ModelTokens {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/real/templates");
    with_template(&std::fs::read_to_string(folder.join(name)).unwrap())
}

fn plain<'a>(messages: &'a [(String, String)]) -> Vec<PlainMessage<'a>> {
    messages
        .iter()
        .map(|(role, content)| PlainMessage {
            role: role.into(),
            content: content.into(),
        })
        .collect()
}

/// Both renderings; errors as their texts.
fn both(tokens: &ModelTokens, messages: &[(String, String)]) -> (Result<String, String>, Result<String, String>) {
    let list: Vec<Value> = messages
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect();
    let body = json!({"messages": list});
    let request = ChatRequest::from_body(&body).unwrap();
    let long = tokens.render_chat(&request).map(|r| r.text).map_err(|e| e.to_string());
    let short = tokens.render_plain(&plain(messages)).map_err(|e| e.to_string());
    (long, short)
}

fn pairs(messages: &[(&str, &str)]) -> Vec<(String, String)> {
    messages
        .iter()
        .map(|(r, c)| ((*r).to_owned(), (*c).to_owned()))
        .collect()
}

/// Whether conversations like this one are rendered from pieces after the first.
fn has_plan(tokens: &ModelTokens, messages: &[(&str, &str)]) -> bool {
    let messages = pairs(messages);
    tokens.render_plain(&plain(&messages)).unwrap();
    tokens.renders_from_pieces(&plain(&messages))
}

const TURNS: [(&str, &str); 4] = [
    ("system", "Be brief."),
    ("user", "What is 2 + 2?"),
    ("assistant", "4"),
    ("user", "And 3 × 7?"),
];

#[test]
fn templates_of_the_common_kinds_have_plans() {
    assert!(has_plan(&ModelTokens::embedded().unwrap(), &TURNS));
    for name in ["namespaces.jinja", "macros.jinja"] {
        assert!(has_plan(&recorded(name), &TURNS), "{name}");
    }
    // Where no assistant has spoken, whose texts these join or trim.
    for name in ["alternating.jinja", "lines.jinja"] {
        assert!(has_plan(&recorded(name), &TURNS[..2]), "{name}");
        assert!(!has_plan(&recorded(name), &TURNS), "{name}");
    }
    // A clock, texts in a namespace.
    for name in ["headers.jinja", "flags.jinja"] {
        assert!(!has_plan(&recorded(name), &TURNS), "{name}");
    }
}

#[test]
fn contents_as_lists_and_through_macros_have_plans() {
    let sources = [
        "{% macro show(content, loud=false) %}{% if content is string %}{{ content | upper }}{% else %}{% for part in content \
         %}{% if 'image' in part or part.type == 'image' %}{{ part.image | upper }}{% elif part.type in ['text'] %}{{ part.text \
         }}{% endif %}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{{ m.content[0]['text'] }}{% endfor %}",
        "{% macro say(text) %}[{{ text }}]{% endmacro %}{% for m in messages %}{{ say(m.content) + '.' }}{% endfor %}",
        "{% macro deep(text, n) %}{% if n > 0 %}{{ deep(text, n - 1) }}{% else %}{{ text }}{% endif %}{% endmacro %}{% for m in \
         messages %}{{ deep(m.content, 3) }}{% endfor %}",
    ];
    for source in sources {
        let tokens = with_template(source);
        assert!(has_plan(&tokens, &TURNS), "{source}");
        let (long, short) = both(&tokens, &pairs(&TURNS));
        assert_eq!(long, short, "{source}");
    }
}

#[test]
fn whatever_looks_at_a_text_is_rendered_by_the_template() {
    let looks = [
        "{{ m.content | upper }}",
        "{{ m.content | tojson }}",
        "{{ m.content[0] }}",
        "{{ m.content | length }}",
        "{{ m }}",
        "{{ messages }}",
        "{{ m.content * 2 }}",
        "{{ m.content if m.content == 'x' else 'y' }}",
        "{{ m.content > 'k' }}",
        "{{ m.content in 'some words' }}",
        "{% if m.content == 'x' %}1{% endif %}",
        "{% if m.content is lower %}1{% endif %}",
        "{% if m == messages[0] %}1{% endif %}",
        "{% for c in m.content %}{{ c }}.{% endfor %}",
        "{% set ns = namespace(x=m.content) %}{{ ns.x | upper }}",
        "{% set ns = namespace(x='') %}{% set ns.x = m.content %}{{ ns.x | title }}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | upper }}",
        "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(m.content) }}",
        "{% macro f() %}{{ messages[0].content }}{% endmacro %}{{ f() | upper }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) | upper }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% macro f(y) %}{{ y | upper }}{% endmacro %}{{ f(m.content) }}",
        "{% macro f(x, y='') %}{{ y | upper }}{% endmacro %}{{ f('', y=m.content) }}",
        "{% macro f(x) %}{% if x is not string %}{{ messages[0].content | upper }}{% endif %}{% endmacro %}{{ f() }}{{ f(m.content) }}",
        "{% macro f(x) %}{% if x %}{{ x }}{% else %}{{ messages[0].content | upper }}{% endif %}{% endmacro %}{{ f() }}{{ f(m.content) }}",
        "{% macro f() %}{{ caller() | upper }}{% endmacro %}{% call f() %}{{ m.content }}{% endcall %}",
        "{% for c in m.content %}{{ c.text | upper }}{% endfor %}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text | upper }}{% endif %}{% endfor %}",
        "{% for c in m.content %}{% if c.type != 'image' %}{{ c.text | length }}{% endif %}{% endfor %}",
        "{% for c in m.content %}{% if c.text == 'x' %}1{% endif %}{% endfor %}",
        "{% for c in m.content %}{% if 'text' in c %}{{ c.text | upper }}{% endif %}{% endfor %}",
        "{% for c in m.content %}{{ c.items() | list }}{% endfor %}",
        "{% for c in m.content %}{% endfor %}{{ m.content | map(attribute='text') | join('') | upper }}",
        "{{ [m.content] | first | upper }}",
        "{{ {'a': m.content}['a'] | upper }}",
        "{{ dict(a=m.content)['a'] | upper }}",
        "{% set x = m.content ~ '!' %}{{ x | upper }}",
        "{% set x = m.content if loop.first else 'none' %}{{ x | replace('a', 'b') }}",
        "{% with x = m.content %}{{ x.split(' ') | last }}{% endwith %}",
        "{{ m.content.split('a')[0] }}",
        "{{ m.content.upper() }}",
        "{{ m.get('content').upper() }}",
        "{{ m['content'] | replace('a', 'b') }}",
        "{{ m.items() | list }}",
        "{{ messages | map(attribute='content') | join('') | upper }}",
        "{{ messages | selectattr('content', 'equalto', 'x') | list | length }}",
        "{{ (loop.previtem or m).content | upper }}",
        "{% if loop.changed(m.content) %}1{% endif %}",
        "{{ debug() | length }}",
        "{% set x = (m.content, 1) %}{{ x[0] | upper }}",
        "{% set f = m.content.upper %}{{ f() }}",
        "{{ range(m.content | length) | list }}",
        // A branch that is entered although a variable of this name holds a text elsewhere.
        "{% if not seen %}{{ m.content | upper }}{% endif %}{% set seen = m.content %}",
        "{% if seen is not string %}{{ m.content | upper }}{% endif %}{% set seen = m.content %}",
    ];
    // Texts that show a change, and others that don't, whichever come first.
    let conversations = [
        pairs(&TURNS),
        pairs(&[("system", "X"), ("user", "X"), ("assistant", "X"), ("user", "X")]),
        pairs(&[
            ("system", "x"),
            ("user", "x"),
            ("assistant", "X a b"),
            ("user", "words"),
        ]),
    ];
    for look in looks {
        for first in 0..2 {
            let tokens = with_template(&format!("{{% for m in messages %}}[{look}]{{% endfor %}}"));
            for at in 0..conversations.len() {
                let messages = &conversations[(first + at) % conversations.len()];
                let (long, short) = both(&tokens, messages);
                assert_eq!(long, short, "{look}");
                let from_pieces = tokens.renders_from_pieces(&plain(messages));
                assert!(!from_pieces, "{look}");
            }
        }
    }
}

#[test]
fn texts_that_a_condition_speaks_of_are_rendered_by_the_template() {
    let tokens = with_template(
        "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% elif \
         m.content.startswith('#') %}title{% elif m.content %}{{ m.content | trim }}{% else %}empty{% endif %}{% endfor %}",
    );
    for text in [
        "hello",
        " spaced\n",
        "",
        "# head",
        "a </think> b",
        "</think>",
        "tail\u{3000}",
    ] {
        for known in [false, true] {
            let messages = pairs(&[("user", text), ("assistant", "sure")]);
            let (long, short) = both(&tokens, &messages);
            assert_eq!(long, short, "{text:?} {known}");
        }
    }
    assert!(has_plan(&tokens, &[("user", "hello"), ("assistant", "sure")]));
}

#[test]
fn messages_that_mean_more_than_they_hold_are_read_the_long_way() {
    let tokens = ModelTokens::embedded().unwrap();
    for messages in [
        &[("developer", "Be brief."), ("user", "hi")][..],
        &[("system", "x-anthropic-billing-header: 1\nBe brief."), ("user", "hi")],
        &[("user", "\u{10FFFC}0\u{10FFFC}"), ("user", "hi")],
        &[("user\n", "a"), ("\u{10FFFC}1\u{10FFFC}", "b")],
        &[("", "a"), ("tool", "b")],
    ] {
        let messages = pairs(messages);
        for _ in 0..2 {
            let (long, short) = both(&tokens, &messages);
            assert_eq!(long, short, "{messages:?}");
        }
    }
    assert!(tokens.render_plain(&[]).is_err());
}

fn conversations() -> impl Strategy<Value = Vec<(String, String)>> {
    let role = prop_oneof![
        4 => Just("user"), 3 => Just("assistant"), 2 => Just("system"), 1 => Just("tool"), 1 => Just("developer"), 1 => Just("stop"),
    ];
    let text = prop_oneof![
        4 => "[ -~]{0,40}",
        2 => "\\PC{0,20}",
        1 => Just("</think>".to_owned()),
        1 => Just("<tool_response>x</tool_response>".to_owned()),
        1 => Just(" \n".to_owned()),
    ];
    prop::collection::vec((role.prop_map(str::to_owned), text), 1..6)
}

#[test]
fn any_conversation_renders_alike_both_ways() {
    let mut models = vec![ModelTokens::embedded().unwrap()];
    for name in ["alternating", "flags", "headers", "lines", "macros", "namespaces"] {
        models.push(recorded(&format!("{name}.jinja")));
    }
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(400));
    runner
        .run(&conversations(), |messages| {
            for tokens in &models {
                let (long, short) = both(tokens, &messages);
                prop_assert_eq!(long, short);
            }
            Ok(())
        })
        .unwrap();
}
