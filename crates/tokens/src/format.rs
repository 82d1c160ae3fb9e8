//! Whether a chat template wants message content as one string or as a list of parts.
//!
//! vLLM reads this off the template's syntax tree: a loop over a message's content means a list. The same walk
//! here, so that both sides hand the template the same shape.

use minijinja::machinery::ast::{CallArg, Expr, Stmt};
use std::collections::{HashMap, HashSet};

/// The shape of message content that a template gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContentFormat {
    /// One string; parts are joined by newlines.
    String,
    /// A list of typed parts.
    OpenAi,
}

/// Detects the format that a parsed template expects.
pub(crate) fn detect(root: &Stmt<'_>) -> ContentFormat {
    let mut nodes = Nodes::default();
    nodes.statement(root, None);
    match loops_over_content(&nodes) {
        Ok(true) => ContentFormat::OpenAi,
        // A tree that the walk can't follow counts as a plain string template.
        Ok(false) | Err(Unfollowed) => ContentFormat::String,
    }
}

/// An assignment or loop whose target isn't a plain name where one was needed.
struct Unfollowed;

/// The statements that matter, in document order.
#[derive(Default)]
struct Nodes<'t> {
    sets: Vec<(&'t Expr<'t>, &'t Expr<'t>)>,
    loops: Vec<Loop<'t>>,
    macros: Vec<(&'t str, Vec<&'t str>)>,
    calls: Vec<(&'t str, &'t [CallArg<'t>])>,
}

struct Loop<'t> {
    target: &'t Expr<'t>,
    iter: &'t Expr<'t>,
    in_macro: Option<usize>,
}

fn loops_over_content(nodes: &Nodes<'_>) -> Result<bool, Unfollowed> {
    let messages = message_names(nodes)?;
    let is_content = |e: &Expr<'_>| messages.iter().any(|m| reaches(e, m, Some("content")));
    let macro_params = macro_content_params(nodes, &is_content);
    for each in &nodes.loops {
        let found = if is_content(each.iter) {
            true
        } else if let Expr::Var(var) = each.iter {
            match each.in_macro {
                Some(at) => macro_params.get(&at).is_some_and(|names| names.contains(var.id)),
                None => var.id == "content",
            }
        } else {
            false
        };
        if found {
            name(each.target)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// The loop variables that run over `messages`, or over a variable assigned from it.
fn message_names<'t>(nodes: &Nodes<'t>) -> Result<Vec<&'t str>, Unfollowed> {
    let mut lists: Vec<&str> = vec!["messages"];
    let mut seen: HashSet<&str> = HashSet::from(["messages"]);
    let mut next = 0;
    while next < lists.len() {
        for (target, value) in &nodes.sets {
            if reaches(value, lists[next], None) {
                let target = name(target)?;
                if seen.insert(target) {
                    lists.push(target);
                }
            }
        }
        next += 1;
    }
    let mut out = Vec::new();
    for each in &nodes.loops {
        if lists.iter().any(|list| reaches(each.iter, list, None)) {
            out.push(name(each.target)?);
        }
    }
    Ok(out)
}

/// For each macro, the parameters that some call fills with message content.
fn macro_content_params<'t>(
    nodes: &Nodes<'t>,
    is_content: &dyn Fn(&Expr<'_>) -> bool,
) -> HashMap<usize, HashSet<&'t str>> {
    let mut out: HashMap<usize, HashSet<&str>> = HashMap::new();
    for (at, (macro_name, params)) in nodes.macros.iter().enumerate() {
        for (_, args) in nodes.calls.iter().filter(|(called, _)| called == macro_name) {
            let positional = args.iter().filter(|a| matches!(a, CallArg::Pos(_)));
            for (param, arg) in params.iter().zip(positional) {
                if matches!(arg, CallArg::Pos(e) if is_content(e)) {
                    out.entry(at).or_default().insert(param);
                }
            }
            for arg in *args {
                if let CallArg::Kwarg(key, value) = arg
                    && let Some(param) = params.iter().find(|p| *p == key)
                    && is_content(value)
                {
                    out.entry(at).or_default().insert(param);
                }
            }
        }
    }
    out
}

fn name<'t>(target: &'t Expr<'t>) -> Result<&'t str, Unfollowed> {
    match target {
        Expr::Var(var) => Ok(var.id),
        _ => Err(Unfollowed),
    }
}

/// Whether the expression is the variable (or its field `key`), possibly filtered, tested or sliced.
fn reaches(e: &Expr<'_>, variable: &str, key: Option<&str>) -> bool {
    match e {
        Expr::Filter(f) => f.expr.as_ref().is_some_and(|inner| reaches(inner, variable, key)),
        Expr::Test(t) => reaches(&t.expr, variable, key),
        Expr::Slice(s) => reaches(&s.expr, variable, key),
        Expr::Var(v) => key.is_none() && v.id == variable,
        Expr::GetAttr(g) => key == Some(g.name) && is_var(&g.expr, variable),
        Expr::GetItem(g) => {
            let constant = matches!(&g.subscript_expr, Expr::Const(c) if c.value.as_str() == key && key.is_some());
            constant && is_var(&g.expr, variable)
        }
        _ => false,
    }
}

fn is_var(e: &Expr<'_>, variable: &str) -> bool {
    matches!(e, Expr::Var(v) if v.id == variable)
}

impl<'t> Nodes<'t> {
    fn body(&mut self, body: &'t [Stmt<'t>], in_macro: Option<usize>) {
        for statement in body {
            self.statement(statement, in_macro);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'t>, in_macro: Option<usize>) {
        match statement {
            Stmt::Template(t) => self.body(&t.children, in_macro),
            Stmt::EmitExpr(e) => self.expr(&e.expr),
            Stmt::ForLoop(f) => {
                self.loops.push(Loop {
                    target: &f.target,
                    iter: &f.iter,
                    in_macro,
                });
                self.expr(&f.iter);
                f.filter_expr.iter().for_each(|e| self.expr(e));
                self.body(&f.body, in_macro);
                self.body(&f.else_body, in_macro);
            }
            Stmt::IfCond(c) => {
                self.expr(&c.expr);
                self.body(&c.true_body, in_macro);
                self.body(&c.false_body, in_macro);
            }
            Stmt::WithBlock(w) => {
                w.assignments.iter().for_each(|(_, e)| self.expr(e));
                self.body(&w.body, in_macro);
            }
            Stmt::Set(s) => {
                self.sets.push((&s.target, &s.expr));
                self.expr(&s.expr);
            }
            Stmt::SetBlock(s) => self.body(&s.body, in_macro),
            Stmt::AutoEscape(a) => self.body(&a.body, in_macro),
            Stmt::FilterBlock(f) => self.body(&f.body, in_macro),
            Stmt::Block(b) => self.body(&b.body, in_macro),
            Stmt::Macro(m) => {
                let at = self.macros.len();
                self.macros
                    .push((m.name, m.args.iter().filter_map(|a| name(a).ok()).collect()));
                m.defaults.iter().for_each(|e| self.expr(e));
                self.body(&m.body, Some(at));
            }
            Stmt::CallBlock(c) => {
                self.call(&c.call.expr, &c.call.args);
                self.body(&c.macro_decl.body, in_macro);
            }
            Stmt::Do(d) => self.call(&d.call.expr, &d.call.args),
            Stmt::EmitRaw(_)
            | Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::Continue(_)
            | Stmt::Break(_) => {}
        }
    }

    fn call(&mut self, callee: &'t Expr<'t>, args: &'t [CallArg<'t>]) {
        match callee {
            Expr::Var(v) => self.calls.push((v.id, args)),
            other => self.expr(other),
        }
        self.args(args);
    }

    fn args(&mut self, args: &'t [CallArg<'t>]) {
        for arg in args {
            match arg {
                CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => self.expr(e),
            }
        }
    }

    fn expr(&mut self, e: &'t Expr<'t>) {
        match e {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(s) => {
                self.expr(&s.expr);
                [&s.start, &s.stop, &s.step]
                    .into_iter()
                    .flatten()
                    .for_each(|e| self.expr(e));
            }
            Expr::UnaryOp(u) => self.expr(&u.expr),
            Expr::BinOp(b) => {
                self.expr(&b.left);
                self.expr(&b.right);
            }
            Expr::Compare(c) => {
                self.expr(&c.expr);
                c.ops.iter().for_each(|op| self.expr(&op.expr));
            }
            Expr::IfExpr(i) => {
                self.expr(&i.test_expr);
                self.expr(&i.true_expr);
                i.false_expr.iter().for_each(|e| self.expr(e));
            }
            Expr::Filter(f) => {
                f.expr.iter().for_each(|e| self.expr(e));
                self.args(&f.args);
            }
            Expr::Test(t) => {
                self.expr(&t.expr);
                self.args(&t.args);
            }
            Expr::GetAttr(g) => self.expr(&g.expr),
            Expr::GetItem(g) => {
                self.expr(&g.expr);
                self.expr(&g.subscript_expr);
            }
            Expr::Call(c) => self.call(&c.expr, &c.args),
            Expr::List(l) => l.items.iter().for_each(|e| self.expr(e)),
            Expr::Tuple(t) => t.items.iter().for_each(|e| self.expr(e)),
            Expr::Map(m) => m.keys.iter().chain(&m.values).for_each(|e| self.expr(e)),
        }
    }
}
