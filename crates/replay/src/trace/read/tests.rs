//! Importers on small inputs of every format, and on broken ones.

use super::*;
use crate::engine_model::Micros;

fn error(text: &str) -> String {
    read("t", text.as_bytes(), None).unwrap_err().to_string()
}

#[test]
fn json_lines_give_rows_that_share_what_their_ids_share() {
    let text = "{\"timestamp\":0,\"input_length\":700,\"output_length\":5,\"hash_ids\":[0,1]}\n\
                {\"timestamp\":27.5,\"input_length\":512,\"output_length\":0,\"hash_ids\":[0],\"session_id\":3}\n";
    let trace = read("t", text.as_bytes(), None).unwrap();
    assert_eq!(
        (trace.block, trace.rows.len(), trace.rows[1].at),
        (512, 2, Micros(27_500))
    );
    assert_eq!((trace.rows[1].output, trace.session(&trace.rows[1])), (1, "3"));
    let blocks = |index: usize| {
        let (mut path, mut names) = (Vec::new(), Vec::new());
        trace.chains.path(trace.rows[index].last, &mut path);
        trace.name_blocks(index, 16, &path, &mut names);
        names
    };
    assert_eq!((blocks(0).len(), blocks(1).len()), (43, 32));
    assert_eq!(blocks(0)[..32], blocks(1)[..]);
    assert!((trace.oracle_hit() - 511.0 / 1_212.0).abs() < 1e-9);
}

#[test]
fn an_error_names_line_and_field() {
    for (line, names) in [
        (
            "{\"timestamp\":0,\"input_length\":-1,\"output_length\":1}",
            "line 1: input_length",
        ),
        (
            "{\"timestamp\":0,\"output_length\":1}",
            "line 1: input_length is missing",
        ),
        (
            "{\"timestamp\":0,\"input_length\":9,\"output_length\":1,\"hash_ids\":[-4]}",
            "line 1: hash_ids",
        ),
        (
            "{\"timestamp\":0,\"input_length\":99999999999,\"output_length\":1}",
            "line 1: input_length",
        ),
        ("{\"timestamp\"", "not JSON"),
        ("", "no requests"),
        ("time,input\n1,2", "line 1: output"),
        ("time,input,output\n1,2,x", "line 2: output"),
        ("time,input,output\nyesterday,2,3", "line 2: time"),
        (
            "{\"requests\":[{\"t\":0,\"in\":70,\"hash_ids\":[1]}]}",
            "line 1: requests.out is missing",
        ),
        (
            "{\"event\":{\"event_type\":\"request_end\",\"request\":{\"output_tokens\":3}}}",
            "line 1: request.input_tokens is missing",
        ),
        (
            "{\"timestamp\":0,\"input_length\":700,\"output_length\":5,\"hash_ids\":[0,1,2,3,4,5,6,7,8]}",
            "line 1: hash_ids",
        ),
    ] {
        let error = error(line);
        assert!(error.contains(names), "{line}: {error}");
    }
}

#[test]
fn tables_with_dates_and_without_a_final_newline_are_read() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-30 23:59:59.5,10,2\r\n2023-12-01 00:00:01.0,20,3";
    let trace = read("t", text.as_bytes(), None).unwrap();
    assert_eq!((trace.rows[1].at, trace.rows[1].input), (Micros(1_500_000), 20));
    assert_eq!(trace.oracle_hit(), 0.0);
}

#[test]
fn one_id_under_two_parents_is_two_blocks() {
    let text = "{\"timestamp\":0,\"input_length\":32,\"output_length\":1,\"hash_ids\":[1,9]}\n\
                {\"timestamp\":1,\"input_length\":32,\"output_length\":1,\"hash_ids\":[2,9]}\n";
    let trace = read("t", text.as_bytes(), Some(16)).unwrap();
    assert_eq!((trace.chains.len(), trace.oracle_hit()), (4, 0.0));
}

#[test]
fn sessions_share_tools_and_system_prompt_and_nothing_else() {
    let session = |id: &str| {
        format!(
            "{{\"id\":\"{id}\",\"model\":\"m\",\"B\":64,\"tool\":100,\"sys\":30,\"requests\":[\
             {{\"t\":0,\"in\":260,\"out\":9,\"hr\":[[1,4]]}},\
             {{\"t\":5,\"sub\":\"a\",\"tool\":64,\"sys\":0,\"requests\":[{{\"t\":1,\"in\":64,\"out\":1,\"hr\":[[9,1]]}}]}}]}}\n"
        )
    };
    let text = session("a") + &session("b");
    let trace = read("t", text.as_bytes(), None).unwrap();
    assert_eq!((trace.block, trace.rows.len(), trace.sessions.len()), (64, 4, 4));
    // Two blocks of 64 lie within the 130 tokens of tools and system prompt, and one in the sub-agent's 64.
    let hits: u32 = trace.oracle_tokens().iter().sum();
    assert_eq!(hits, 128 + 63);
    let at = |name: &str| {
        let row = trace.rows.iter().find(|row| trace.session(row) == name).unwrap();
        row.at
    };
    assert_eq!(at("a/a").since(at("a")), Micros(6_000_000));
}

#[test]
fn dynamo_events_that_end_a_request_are_rows() {
    let text = "{\"event\":{\"event_type\":\"tool_start\"}}\n\
        {\"event\":{\"event_type\":\"request_end\",\"agent_context\":{\"session_id\":\"s\"},\"request\":{\"input_tokens\":40,\
        \"output_tokens\":3,\"request_received_ms\":1779163048815,\"replay\":{\"trace_block_size\":16,\"input_length\":40,\
        \"input_sequence_hashes\":[1,18446744073709551615,3]}}}}\n";
    let trace = read("t", text.as_bytes(), None).unwrap();
    assert_eq!((trace.block, trace.rows.len(), trace.rows[0].at), (16, 1, Micros(0)));
    assert_eq!((trace.rows[0].input, trace.chains.depth(trace.rows[0].last)), (40, 3));
}
