//! The end of a step: events go out, tokens come out, finished requests give back their blocks.

use super::events::{EventBatch, Finish, FinishReason, Output, StepOutcome};
use super::pool::BlockId;
use super::request::{RequestId, Sequence};
use super::timing::Micros;
use super::{EngineModel, Held};
use cairn_blocks::Token;

impl EngineModel {
    /// Completes the step in flight.
    pub(super) fn complete(&mut self, out: &mut StepOutcome) {
        let Some(step) = self.in_flight.take() else { return };
        let at = step.ends;
        self.clock = at;
        self.counters.steps += 1;
        if !self.events.is_empty() {
            out.batches.push(EventBatch {
                at,
                events: std::mem::take(&mut self.events),
            });
        }
        for id in step.items {
            self.advance(id, at, out);
        }
    }

    /// Generates a token for a request whose tokens are all computed.
    fn advance(&mut self, id: RequestId, at: Micros, out: &mut StepOutcome) {
        let (root, block_size) = (self.root, self.config.block_size as usize);
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        if sequence.computed < sequence.len {
            return;
        }
        let token = sequence.generate();
        if token.is_some() {
            self.counters.generation_tokens += 1;
            sequence.first_token.get_or_insert(at);
            sequence.hash_full_blocks(root, block_size);
        }
        if sequence.output_len() < sequence.answer.len() {
            out.outputs.push(Output {
                id,
                at,
                token,
                finish: None,
            });
            return;
        }
        self.running.retain(|other| *other != id);
        let Some(mut sequence) = self.sequences.remove(&id.0) else {
            return;
        };
        let blocks = std::mem::take(&mut sequence.blocks);
        let reason = sequence.ends_by;
        match reason {
            FinishReason::Length => self.counters.finished_length += 1,
            FinishReason::Stop | FinishReason::TransferFailed => self.counters.finished_stop += 1,
        }
        let held = if sequence.hold {
            let until = at.plus(Micros::from_seconds(self.config.hold_s));
            self.held.push_back(Held {
                id,
                blocks: blocks.clone(),
                until,
            });
            blocks
        } else {
            self.pool.release(blocks.iter().rev().copied());
            Vec::new()
        };
        let output = self.ended(sequence, at, token, reason, held);
        out.outputs.push(output);
    }

    /// The last output of a request.
    pub(super) fn ended(
        &self,
        sequence: Sequence,
        at: Micros,
        token: Option<Token>,
        reason: FinishReason,
        held: Vec<BlockId>,
    ) -> Output {
        let finish = Finish {
            reason,
            prompt_tokens: sequence.prompt_len as u32,
            output_tokens: sequence.output_len() as u32,
            cached: sequence.cached.unwrap_or_default(),
            arrived: sequence.arrived,
            scheduled: sequence.scheduled.unwrap_or(at),
            first_token: sequence.first_token,
            preemptions: sequence.preemptions,
            held,
        };
        Output {
            id: sequence.id,
            at,
            token,
            finish: Some(finish),
        }
    }
}
