//! The choice itself: a worker for the whole request, or a pair where a split pays.

use cairn_index::WorkerId;

use crate::policy::{Candidate, Policy, Reason, Score, Situation, pick};
use crate::{Terms, WhyNot};

/// Who serves a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// One worker.
    Whole {
        /// It.
        worker: WorkerId,
    },
    /// One computes the prompt, another answers.
    Split {
        /// Computes the prompt.
        prefill: WorkerId,
        /// Answers.
        decode: WorkerId,
    },
}

/// No worker can serve the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// The pool has no workers.
    #[error("pool has no workers; start engines and their agents, or wait for them to register")]
    EmptyPool,
    /// None of them is eligible.
    #[error("none of {workers} workers can serve this request; most are out for {most}", most = most.as_str())]
    NoneEligible {
        /// How many there are.
        workers: usize,
        /// The most frequent reason.
        most: WhyNot,
    },
}

/// Buffers that decisions share.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<Score>,
    whole: Vec<Candidate>,
    prefill: Vec<Candidate>,
    decode: Vec<u32>,
}

/// A choice before it is dressed up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Made {
    pub(crate) plan: Plan,
    pub(crate) runner_up: Option<WorkerId>,
    pub(crate) reason: Reason,
    pub(crate) terms: Terms,
}

/// Whether a reason leaves the worker as a last resort.
pub(crate) fn last_resort(why: WhyNot) -> bool {
    match why {
        WhyNot::BreakerOpen | WhyNot::Backpressure | WhyNot::AtLimit | WhyNot::TransfersFail => true,
        WhyNot::Unhealthy
        | WhyNot::Asleep
        | WhyNot::Draining
        | WhyNot::AdapterMissing
        | WhyNot::TooLong
        | WhyNot::Excluded
        | WhyNot::Role => false,
    }
}

/// Best prefill workers that are tried in pairs; the pair's cost is a sum, so deeper ones hardly win.
const PAIR_WIDTH: usize = 8;

#[expect(
    clippy::too_many_arguments,
    reason = "the record's fields, one by one, so that verify can't pass another thing"
)]
pub(crate) fn choose(
    policy: &dyn Policy,
    candidates: &[Candidate],
    ordinal: u64,
    draw: u64,
    identity: u64,
    may_split: bool,
    avoided: impl Fn(WorkerId, WorkerId) -> bool,
    scratch: &mut Scratch,
) -> Result<Made, ChoiceError> {
    if candidates.is_empty() {
        return Err(ChoiceError::EmptyPool);
    }
    let Scratch {
        scores,
        whole,
        prefill,
        decode,
    } = scratch;
    let mut pick_among = |set: &[Candidate]| {
        let situation = Situation {
            candidates: set,
            ordinal,
            draw,
            identity,
        };
        let picked = pick(policy, &situation, scores);
        let reason = if set.len() == 1 {
            Reason::Only
        } else {
            policy.reason(&situation, picked.chosen)
        };
        (picked, reason)
    };
    whole.clear();
    let all_can = candidates.iter().all(|c| c.why_not.is_none());
    let set: &[Candidate] = if all_can {
        candidates
    } else {
        whole.extend(candidates.iter().filter(|c| c.why_not.is_none()));
        whole
    };
    let made_whole = (!set.is_empty()).then(|| {
        let (picked, reason) = pick_among(set);
        let c = &set[picked.chosen];
        let runner_up = picked.runner_up.map(|at| set[at].worker);
        (
            Made {
                plan: Plan::Whole { worker: c.worker },
                runner_up,
                reason,
                terms: c.terms,
            },
            *c,
        )
    });
    if may_split {
        let split = best_pair(candidates, &avoided, prefill, decode, &mut pick_among);
        match (split, &made_whole) {
            (Some(split), None) => return Ok(split),
            (Some(split), Some((_, c))) => {
                // A worker whose role is decode is there for answers that stream: one will soon, even if none does now.
                let decodes_only = c.decode_leg && !c.prefill_leg;
                let expected_us = if decodes_only { c.terms.others_us / 4 } else { 0 };
                let disturbance_us = c.inputs.disturbance_us(c.terms.prefill_us).max(expected_us);
                let whole_cost = c.terms.cost().0 + disturbance_us;
                if split.terms.cost().0 < whole_cost {
                    return Ok(split);
                }
            }
            (None, _) => {}
        }
    }
    if let Some((made, _)) = made_whole {
        return Ok(made);
    }
    last_choice(candidates, may_split, whole, &mut pick_among)
}

/// The pair with the least cost among the best prefill workers and all decode workers, leaving out avoided pairs.
fn best_pair(
    candidates: &[Candidate],
    avoided: &impl Fn(WorkerId, WorkerId) -> bool,
    prefill: &mut Vec<Candidate>,
    decode: &mut Vec<u32>,
    pick_among: &mut impl FnMut(&[Candidate]) -> (crate::policy::Pick, Reason),
) -> Option<Made> {
    prefill.clear();
    prefill.extend(candidates.iter().filter(|c| c.prefill_leg));
    decode.clear();
    decode.extend(
        candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| c.decode_leg)
            .map(|(at, _)| at as u32),
    );
    if prefill.is_empty() || decode.is_empty() {
        return None;
    }
    let mut best: Option<(u64, Made)> = None;
    for _ in 0..PAIR_WIDTH {
        if prefill.is_empty() {
            break;
        }
        // The policy orders the prefill side; the decode side goes by the time it adds.
        let (picked, _) = pick_among(prefill);
        let p = prefill[picked.chosen];
        let runner_up = picked.runner_up.map(|at| prefill[at].worker);
        for &at in decode.iter() {
            let d = &candidates[at as usize];
            if d.worker == p.worker || avoided(p.worker, d.worker) {
                continue;
            }
            let mut terms = p.terms;
            terms.transfer_us = d.inputs.transfer_us() + d.inputs.decode_us();
            let cost = terms.cost().0;
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                let plan = Plan::Split {
                    prefill: p.worker,
                    decode: d.worker,
                };
                best = Some((
                    cost,
                    Made {
                        plan,
                        runner_up,
                        reason: Reason::Split,
                        terms,
                    },
                ));
            }
        }
        prefill.remove(picked.chosen);
    }
    best.map(|(_, made)| made)
}

/// Everyone has something against it: whoever is only paused, broken or full is asked all the same (INV-10).
fn last_choice(
    candidates: &[Candidate],
    may_split: bool,
    set: &mut Vec<Candidate>,
    pick_among: &mut impl FnMut(&[Candidate]) -> (crate::policy::Pick, Reason),
) -> Result<Made, ChoiceError> {
    set.clear();
    set.extend(candidates.iter().filter(|c| c.why_not.is_some_and(last_resort)));
    if !set.is_empty() {
        let (picked, _) = pick_among(set);
        let c = &set[picked.chosen];
        let runner_up = picked.runner_up.map(|at| set[at].worker);
        let plan = Plan::Whole { worker: c.worker };
        return Ok(Made {
            plan,
            runner_up,
            reason: Reason::LastResort,
            terms: c.terms,
        });
    }
    if may_split {
        // Only pairs are left, and all of them are avoided: better a doubtful transfer than none.
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        if let Some(mut made) = best_pair(candidates, &|_, _| false, &mut prefill, &mut decode, pick_among) {
            made.reason = Reason::LastResort;
            return Ok(made);
        }
    }
    let most = most_frequent(candidates.iter().filter_map(|c| c.why_not));
    Err(ChoiceError::NoneEligible {
        workers: candidates.len(),
        most,
    })
}

fn most_frequent(reasons: impl Iterator<Item = WhyNot>) -> WhyNot {
    let mut counts: Vec<(WhyNot, usize)> = Vec::new();
    for why in reasons {
        match counts.iter_mut().find(|(w, _)| *w == why) {
            Some((_, n)) => *n += 1,
            None => counts.push((why, 1)),
        }
    }
    counts
        .into_iter()
        .max_by_key(|(_, n)| *n)
        .map_or(WhyNot::Unhealthy, |(why, _)| why)
}
