//! Where the texts of messages go in a template: whether they are only written, so that which pieces a rendering has hangs
//! on the roles alone.
//!
//! A walk over the syntax tree for one set of roles. Branches that no such conversation enters are left out; a branch
//! that a text decides (`'</think>' in content`) is left out under a condition on all texts, which is noted. Whatever
//! else looks at a text makes the template [`Opaque`].

mod expressions;

use super::conditions::Conditions;
use super::seen::{Kind, Opaque, Seen};
use crate::format::ContentFormat;
use minijinja::Value;
use minijinja::machinery::ast::{CallArg, Expr, Macro, Stmt};
use std::collections::{BTreeSet, HashMap};

/// Under which conditions on its texts a conversation of `roles` is rendered from pieces that the roles decide, where
/// messages have their content in this `format`; `given` are the template's other variables.
pub(in crate::template) fn follow(
    tree: &Stmt<'_>,
    roles: &BTreeSet<&str>,
    format: ContentFormat,
    given: &[(&str, Value)],
) -> Result<Conditions, Opaque> {
    let content = match format {
        ContentFormat::String => Kind::Text,
        // Tools' results are texts there too.
        ContentFormat::OpenAi if roles.contains("tool") => return Err(Opaque),
        ContentFormat::OpenAi => Kind::Parts,
    };
    let mut flow = Flow {
        roles,
        content,
        given,
        assigned: HashMap::from([("messages", Seen::sure(Kind::Messages))]),
        conditions: Conditions::default(),
        macros: HashMap::new(),
        scope: Vec::new(),
        changed: true,
        output: Kind::Fixed,
    };
    // What a variable may hold only grows, so this ends; the last round has seen every branch with what they hold.
    while std::mem::take(&mut flow.changed) {
        flow.conditions = Conditions::default();
        flow.statement(tree)?;
    }
    Ok(flow.conditions)
}

struct Flow<'t, 'g> {
    roles: &'g BTreeSet<&'g str>,
    /// What a message's content is.
    content: Kind,
    given: &'g [(&'g str, Value)],
    /// What each assigned variable may hold, whatever the scope.
    assigned: HashMap<&'t str, Seen>,
    /// The parameters of each macro, and what calls give.
    macros: HashMap<&'t str, (Vec<&'t str>, Kind)>,
    /// Names that are set where the walk is: targets of loops, parameters of macros.
    scope: Vec<&'t str>,
    conditions: Conditions,
    changed: bool,
    /// What has been written, inside a macro or a captured block.
    output: Kind,
}

impl<'t> Flow<'t, '_> {
    fn body(&mut self, body: &'t [Stmt<'t>]) -> Result<(), Opaque> {
        body.iter().try_for_each(|statement| self.statement(statement))
    }

    /// A body whose output is a value: what that is.
    fn captured(&mut self, body: &'t [Stmt<'t>]) -> Result<Kind, Opaque> {
        let outside = std::mem::replace(&mut self.output, Kind::Fixed);
        self.body(body)?;
        Ok(std::mem::replace(&mut self.output, outside))
    }

    fn statement(&mut self, statement: &'t Stmt<'t>) -> Result<(), Opaque> {
        match statement {
            Stmt::Template(template) => self.body(&template.children),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
            Stmt::EmitExpr(emit) => {
                let seen = self.expr(&emit.expr)?;
                match seen.kind {
                    kind if kind.fixed() => {}
                    Kind::Text | Kind::Joined => self.output = Kind::Joined,
                    _ => return Err(Opaque),
                }
                Ok(())
            }
            Stmt::ForLoop(each) => {
                if each.recursive {
                    return Err(Opaque);
                }
                let over = self.expr(&each.iter)?;
                let item = match over.kind {
                    Kind::Messages => over.item(Kind::Message),
                    Kind::Parts => over.item(Kind::Part),
                    kind if kind.fixed() => Seen::FIXED,
                    _ => return Err(Opaque),
                };
                self.assign(&each.target, item)?;
                let outside = self.scope.len();
                if let Expr::Var(variable) = &each.target {
                    self.scope.push(variable.id);
                }
                let taken = match &each.filter_expr {
                    Some(filter) => self.expr(filter)?.truth,
                    None => None,
                };
                if taken != Some(false) {
                    self.body(&each.body)?;
                }
                self.scope.truncate(outside);
                self.body(&each.else_body)
            }
            Stmt::IfCond(branch) => {
                let truth = self.expr(&branch.expr)?.truth;
                if truth != Some(false) {
                    self.body(&branch.true_body)?;
                }
                if truth != Some(true) {
                    self.body(&branch.false_body)?;
                }
                Ok(())
            }
            Stmt::WithBlock(with) => {
                for (target, value) in &with.assignments {
                    let seen = self.expr(value)?;
                    self.assign(target, seen)?;
                }
                self.body(&with.body)
            }
            Stmt::Set(set) => {
                let seen = self.expr(&set.expr)?;
                self.assign(&set.target, seen)
            }
            Stmt::SetBlock(set) => {
                let kind = self.captured(&set.body)?;
                if set.filter.is_some() {
                    return Err(Opaque);
                }
                self.assign(&set.target, Seen::sure(kind))
            }
            Stmt::Macro(called) => self.define(called),
            Stmt::Do(done) => self.call(&done.call).map(drop),
            Stmt::AutoEscape(_)
            | Stmt::FilterBlock(_)
            | Stmt::Block(_)
            | Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::CallBlock(_) => Err(Opaque),
        }
    }

    /// A macro: its body with all that calls have given it so far.
    fn define(&mut self, called: &'t Macro<'t>) -> Result<(), Opaque> {
        let name = |parameter: &'t Expr<'t>| match parameter {
            Expr::Var(variable) => Ok(variable.id),
            _ => Err(Opaque),
        };
        let parameters = called.args.iter().map(name).collect::<Result<Vec<_>, _>>()?;
        for value in &called.defaults {
            self.fixed(value)?;
        }
        // The last ones have the defaults.
        for with_default in parameters.iter().rev().take(called.defaults.len()) {
            self.note(with_default, Seen::FIXED)?;
        }
        self.note(called.name, Seen::FIXED)?;
        let known = self
            .macros
            .entry(called.name)
            .or_insert_with(|| (parameters.clone(), Kind::Fixed));
        if known.0 != parameters {
            return Err(Opaque);
        }
        let before = known.1;
        let outside = self.scope.len();
        self.scope.extend(&parameters);
        let written = self.captured(&called.body)?;
        self.scope.truncate(outside);
        // What calls give only grows, as what variables hold.
        if before == Kind::Fixed && written != Kind::Fixed {
            self.macros.insert(called.name, (parameters, written));
            self.changed = true;
        }
        Ok(())
    }

    /// A call of a macro, whose parameters get what it gives.
    fn call_macro(&mut self, name: &'t str, args: &'t [CallArg<'t>]) -> Result<Seen, Opaque> {
        let (parameters, gives) = self.macros.get(name).cloned().ok_or(Opaque)?;
        let mut missing = parameters.clone();
        for (at, arg) in args.iter().enumerate() {
            let (to, value) = match arg {
                CallArg::Pos(value) => (*parameters.get(at).ok_or(Opaque)?, value),
                CallArg::Kwarg(to, value) => (*to, value),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => return Err(Opaque),
            };
            let seen = self.expr(value)?;
            let to = parameters.iter().find(|known| **known == to).ok_or(Opaque)?;
            self.note(to, seen)?;
            missing.retain(|known| known != to);
        }
        for parameter in missing {
            self.note(parameter, Seen::FIXED)?;
        }
        Ok(Seen::sure(gives))
    }

    /// Assigns to a name, or something fixed to an attribute or several names.
    fn assign(&mut self, target: &'t Expr<'t>, seen: Seen) -> Result<(), Opaque> {
        match target {
            Expr::Var(variable) => self.note(variable.id, seen),
            _ if !seen.kind.fixed() => Err(Opaque),
            Expr::GetAttr(attribute) => self.fixed(&attribute.expr),
            Expr::List(list) => list.items.iter().try_for_each(|one| self.assign(one, Seen::FIXED)),
            Expr::Tuple(tuple) => tuple.items.iter().try_for_each(|one| self.assign(one, Seen::FIXED)),
            _ => Err(Opaque),
        }
    }

    fn note(&mut self, name: &'t str, seen: Seen) -> Result<(), Opaque> {
        let before = self.assigned.get(name).copied();
        let seen = match before {
            Some(before) => before.or(seen)?,
            // Outside of where it is assigned, the name still means what was given.
            None if self.given.iter().any(|(given, _)| *given == name) => seen.or(Seen::FIXED)?,
            None => seen,
        };
        if before != Some(seen) {
            self.assigned.insert(name, seen);
            self.changed = true;
        }
        Ok(())
    }
}
