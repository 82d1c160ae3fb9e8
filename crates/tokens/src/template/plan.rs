//! Renderings put together from pieces: of a conversation of nothing but roles and texts, most templates write the texts
//! as they are, between parts that the roles decide.
//!
//! For each sequence of roles the template is rendered once with a mark for each text, and cut at the marks. That is right
//! only where no text decides anything, which is read off the syntax tree ([`flow`]); and each plan is compared with one
//! real rendering before it is used.

mod conditions;
mod flow;

use crate::PlainMessage;
pub(super) use conditions::Conditions;
pub(super) use flow::follow;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Encloses a text's number in a mark; from a private-use plane, so that no template holds it.
const MARK: char = '\u{10FFFC}';
/// Longer sequences of roles are rendered each time.
const ROLES_BYTES_MAX: usize = 16 << 10;
/// Plans with more text of the template's own aren't kept.
const FIXED_BYTES_MAX: usize = 64 << 10;
/// All is forgotten when there are more plans, or more bytes in them, than this.
const PLANS_MAX: usize = 512;
const BYTES_MAX: usize = 4 << 20;
/// The same of sets of roles.
const SETS_MAX: usize = 64;

/// What is known of a template's renderings.
#[derive(Debug, Default)]
pub(super) struct Plans(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By roles in their order; `None` where the template has to be rendered.
    by_roles: HashMap<Box<str>, Option<Arc<Plan>>>,
    /// Conditions, by the roles that occur.
    by_set: HashMap<String, Option<Arc<Conditions>>>,
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
        let plan = match self.conditions(messages, follow) {
            // Texts like these tell nothing of others with the same roles.
            Some(conditions) if !messages.iter().all(|m| conditions.hold(&m.content)) => return,
            Some(conditions) => Plan::make(messages, conditions, render).filter(|plan| plan.fill(messages) == text),
            None => None,
        };
        let mut known = self.0.lock();
        let more = roles.len() + plan.as_ref().map_or(0, Plan::bytes);
        if known.by_roles.len() >= PLANS_MAX || known.bytes + more > BYTES_MAX {
            *known = Known::default();
        }
        known.bytes += more;
        known.by_roles.insert(roles.into(), plan.map(Arc::new));
    }

    fn conditions(
        &self,
        messages: &[PlainMessage<'_>],
        follow: impl FnOnce(&BTreeSet<&str>) -> Option<Conditions>,
    ) -> Option<Arc<Conditions>> {
        let set: BTreeSet<&str> = messages.iter().map(|m| &*m.role).collect();
        let name = set.iter().copied().collect::<Vec<_>>().join("\n");
        if let Some(known) = self.0.lock().by_set.get(&name) {
            return known.clone();
        }
        let followed = follow(&set).map(Arc::new);
        let mut known = self.0.lock();
        if known.by_set.len() >= SETS_MAX {
            known.by_set.clear();
        }
        known.by_set.insert(name, followed.clone());
        followed
    }
}

/// The roles in their order; `None` where they are too long to be kept, or could be taken for others.
fn sequence(messages: &[PlainMessage<'_>]) -> Option<String> {
    let bytes: usize = messages.iter().map(|m| m.role.len() + 1).sum();
    let plain = |role: &str| role.bytes().all(|b| (b' '..0x7f).contains(&b));
    if bytes > ROLES_BYTES_MAX || !messages.iter().all(|m| plain(&m.role)) {
        return None;
    }
    let mut out = String::with_capacity(bytes);
    for message in messages {
        out.push_str(&message.role);
        out.push('\n');
    }
    Some(out)
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
