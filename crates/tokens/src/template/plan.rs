//! Renderings put together from pieces: of a conversation of nothing but roles and texts, most templates write the texts
//! as they are, between parts that the roles decide.
//!
//! For each sequence of roles the template is rendered once with a mark for each text, and cut at the marks. That is right
//! only where no text decides anything, which is read off the syntax tree ([`flow`]); and each plan is compared with one
//! real rendering before it is used.

mod conditions;
mod flow;
mod seen;

use crate::PlainMessage;
pub(super) use conditions::Conditions;
pub(super) use flow::follow;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Encloses a text's number in a mark; from a private-use plane, so that no template holds it.
const MARK: char = '\u{10FFFC}';
/// Roles with plans. Engines take any word for a role; others are rendered each time, so that nobody fills the memory, or
/// the time, with plans for words of their own.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];
/// Longer conversations are rendered each time.
const MESSAGES_MAX: usize = 4_096;
/// Plans with more text of the template's own aren't kept.
const FIXED_BYTES_MAX: usize = 64 << 10;
/// All is forgotten when there are more plans, or more bytes in them, than this.
const PLANS_MAX: usize = 512;
const BYTES_MAX: usize = 4 << 20;

/// What is known of a template's renderings.
#[derive(Debug, Default)]
pub(super) struct Plans(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By roles in their order, as places in [`ROLES`]; `None` where the template has to be rendered.
    by_roles: HashMap<Box<[u8]>, Option<Arc<Plan>>>,
    /// Conditions, by the roles that occur, one bit each.
    by_set: HashMap<u8, Option<Arc<Conditions>>>,
    bytes: usize,
}

/// How to render the conversations of one sequence of roles.
#[derive(Debug)]
struct Plan {
    conditions: Arc<Conditions>,
    /// The template's own text, one part after the other.
    fixed: String,
    /// Up to where the next part reaches, and the text that follows it.
    cuts: Vec<(usize, usize)>,
}

/// What a look-up found.
pub(super) enum Found {
    /// The rendering.
    Text(String),
    /// Nothing is known of these roles: to be learned.
    New,
    /// It has to be rendered.
    Unfit,
}

impl Plans {
    /// The rendering of `messages`, where a plan for them is known.
    pub fn render(&self, messages: &[PlainMessage<'_>]) -> Found {
        let Some(roles) = sequence(messages) else {
            return Found::Unfit;
        };
        let known = self.0.lock().by_roles.get(&*roles).cloned();
        match known {
            None => Found::New,
            Some(Some(plan)) if messages.iter().all(|m| plan.conditions.hold(&m.content)) => {
                Found::Text(plan.fill(messages))
            }
            Some(_) => Found::Unfit,
        }
    }

    /// Makes the plan for `messages`, whose real rendering is `text`: under the conditions that `follow` reads off the
    /// template for a set of roles, from what `render` makes of other texts.
    pub fn learn(
        &self,
        messages: &[PlainMessage<'_>],
        text: &str,
        follow: impl FnOnce(&BTreeSet<&str>) -> Option<Conditions>,
        render: impl FnOnce(&[PlainMessage<'_>]) -> Option<String>,
    ) {
        let Some(roles) = sequence(messages) else { return };
        let plan = match self.conditions(&roles, follow) {
            // Texts like these tell nothing of others with the same roles.
            Some(conditions) if !messages.iter().all(|m| conditions.hold(&m.content)) => return,
            Some(conditions) => Plan::make(messages, conditions, render).filter(|plan| plan.fill(messages) == text),
            None => None,
        };
        let mut known = self.0.lock();
        let more = roles.len() + plan.as_ref().map_or(0, Plan::bytes);
        if known.by_roles.len() >= PLANS_MAX || known.bytes + more > BYTES_MAX {
            known.by_roles.clear();
            known.bytes = 0;
        }
        known.bytes += more;
        known.by_roles.insert(roles.into(), plan.map(Arc::new));
    }

    fn conditions(
        &self,
        roles: &[u8],
        follow: impl FnOnce(&BTreeSet<&str>) -> Option<Conditions>,
    ) -> Option<Arc<Conditions>> {
        let bits = roles.iter().fold(0, |bits, at| bits | 1 << at);
        if let Some(known) = self.0.lock().by_set.get(&bits) {
            return known.clone();
        }
        let set = roles.iter().map(|at| ROLES[usize::from(*at)]).collect();
        let followed = follow(&set).map(Arc::new);
        self.0.lock().by_set.insert(bits, followed.clone());
        followed
    }
}

/// The roles in their order; `None` where there is no plan for them.
fn sequence(messages: &[PlainMessage<'_>]) -> Option<Vec<u8>> {
    if messages.len() > MESSAGES_MAX {
        return None;
    }
    let place = |m: &PlainMessage<'_>| ROLES.iter().position(|role| *role == m.role);
    let places = messages.iter().map(place);
    places.map(|at| u8::try_from(at?).ok()).collect()
}

impl Plan {
    fn make(
        messages: &[PlainMessage<'_>],
        conditions: Arc<Conditions>,
        render: impl FnOnce(&[PlainMessage<'_>]) -> Option<String>,
    ) -> Option<Self> {
        let marked: Vec<PlainMessage<'_>> = messages
            .iter()
            .enumerate()
            .map(|(at, message)| PlainMessage {
                role: message.role.clone(),
                content: Cow::Owned(format!("{MARK}{at}{MARK}")),
            })
            .collect();
        if !marked.iter().all(|m| conditions.hold(&m.content)) {
            return None;
        }
        let text = render(&marked)?;
        let mut parts = text.split(MARK);
        let mut fixed = parts.next()?.to_owned();
        let mut cuts = Vec::new();
        while let Some(number) = parts.next() {
            let at = number.parse().ok().filter(|at| *at < messages.len())?;
            cuts.push((fixed.len(), at));
            fixed.push_str(parts.next()?);
        }
        (fixed.len() <= FIXED_BYTES_MAX).then_some(Self {
            conditions,
            fixed,
            cuts,
        })
    }

    fn fill(&self, messages: &[PlainMessage<'_>]) -> String {
        let texts: usize = self.cuts.iter().map(|(_, of)| messages[*of].content.len()).sum();
        let mut out = String::with_capacity(self.fixed.len() + texts);
        let mut from = 0;
        for (to, of) in &self.cuts {
            out.push_str(&self.fixed[from..*to]);
            out.push_str(&messages[*of].content);
            from = *to;
        }
        out.push_str(&self.fixed[from..]);
        out
    }

    fn bytes(&self) -> usize {
        self.fixed.len() + size_of_val(self.cuts.as_slice()) + size_of::<Self>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(turns: usize) -> Vec<PlainMessage<'static>> {
        let message = |at: usize| PlainMessage {
            role: ROLES[1 + at % 2].into(),
            content: format!("text {at}").into(),
        };
        (0..turns).map(message).collect()
    }

    fn written(messages: &[PlainMessage<'_>]) -> String {
        messages.iter().map(|m| format!("<{}>{}", m.role, m.content)).collect()
    }

    fn learn(plans: &Plans, messages: &[PlainMessage<'_>]) {
        let follow = |_: &BTreeSet<&str>| Some(Conditions::default());
        plans.learn(messages, &written(messages), follow, |marked| Some(written(marked)));
    }

    #[test]
    fn plans_stay_within_their_bounds_and_go_on_being_made() {
        let plans = Plans::default();
        for turns in 1..2_000 {
            let messages = conversation(turns);
            learn(&plans, &messages);
            let Found::Text(text) = plans.render(&messages) else {
                panic!("no plan for {turns} turns");
            };
            assert_eq!(text, written(&messages));
            let known = plans.0.lock();
            assert!(known.by_roles.len() <= PLANS_MAX && known.bytes <= BYTES_MAX, "{turns}");
        }
    }

    #[test]
    fn the_longest_conversations_and_templates_have_none() {
        let plans = Plans::default();
        let long = conversation(MESSAGES_MAX + 1);
        learn(&plans, &long);
        assert!(matches!(plans.render(&long), Found::Unfit));
        let messages = conversation(1);
        let wordy = |messages: &[PlainMessage<'_>]| " ".repeat(FIXED_BYTES_MAX + 1) + &messages[0].content;
        let follow = |_: &BTreeSet<&str>| Some(Conditions::default());
        plans.learn(&messages, &wordy(&messages), follow, |marked| Some(wordy(marked)));
        assert!(matches!(plans.render(&messages), Found::Unfit));
    }

    #[test]
    fn a_plan_that_a_real_rendering_contradicts_is_not_used() {
        let plans = Plans::default();
        let messages = conversation(2);
        let follow = |_: &BTreeSet<&str>| Some(Conditions::default());
        let shouted = written(&messages).to_uppercase();
        plans.learn(&messages, &shouted, follow, |marked| {
            Some(written(marked).to_uppercase())
        });
        assert!(matches!(plans.render(&messages), Found::Unfit));
    }
}
