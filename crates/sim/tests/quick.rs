#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]
use cairn_sim::{Plan, run};
#[test]
fn quick() {
    let from: u64 = std::env::var("FROM").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let n: u64 = std::env::var("N").ok().and_then(|s| s.parse().ok()).unwrap_or(5);
    let mut kinds = std::collections::BTreeMap::<String, u64>::new();
    for seed in from..from + n {
        let t = std::time::Instant::now();
        let plan = Plan::from_seed(seed);
        let plan = if std::env::var("TRACE").is_ok() {
            plan.traced()
        } else {
            plan
        };
        let r = run(plan.clone());
        if std::env::var("TRACE").is_ok() {
            for l in r.trace.lines.iter().rev().take(20000).rev() {
                println!("{l}");
            }
            println!("{plan:?}");
        }
        if n <= 20 {
            println!(
                "seed {seed}: {:?} events {} req {} ans {} fail {} abort {} log {} faults {} pred {} cached {} viol {:?} {:?}",
                t.elapsed(),
                r.events,
                r.requests,
                r.answered,
                r.failed,
                r.aborted,
                r.log,
                r.faults,
                r.predicted_tokens,
                r.cached_tokens,
                r.violation,
                r.looked_at
            );
        }
        if let Some(v) = r.violation {
            *kinds
                .entry(format!(
                    "{}: {}",
                    v.invariant,
                    v.what
                        .chars()
                        .map(|c| if c.is_ascii_digit() { '#' } else { c })
                        .collect::<String>()
                ))
                .or_default() += 1;
            if n > 20 {
                println!("seed {seed} {v}");
            }
        }
    }
    println!("{kinds:#?}");
}
