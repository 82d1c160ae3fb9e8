//! What an expression is, by what it is made of.

use super::super::seen::{Kind, Opaque, Seen};
use super::Flow;
use minijinja::Value;
use minijinja::machinery::ast::{BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, Test, UnaryOpKind};

/// Functions whose result hangs on their arguments alone, or on how often they were called.
const FUNCTIONS: [&str; 6] = ["cycler", "dict", "joiner", "namespace", "raise_exception", "range"];
/// Tests that ask for a value's type; with what they say of a text, and of a list.
const TYPES: [(&str, bool, bool); 11] = [
    ("string", true, false),
    ("iterable", true, true),
    ("sequence", true, true),
    ("defined", true, true),
    ("undefined", false, false),
    ("none", false, false),
    ("mapping", false, false),
    ("number", false, false),
    ("integer", false, false),
    ("float", false, false),
    ("boolean", false, false),
];
/// The type of a part that is a text.
const TEXT_TYPE: &str = "text";

impl<'t> Flow<'t, '_> {
    pub(super) fn fixed(&mut self, e: &'t Expr<'t>) -> Result<(), Opaque> {
        self.expr(e)?.kind.fixed().then_some(()).ok_or(Opaque)
    }

    fn all_fixed(&mut self, items: &'t [Expr<'t>]) -> Result<Seen, Opaque> {
        items.iter().try_for_each(|item| self.fixed(item))?;
        Ok(Seen::FIXED)
    }

    pub(super) fn fixed_args(&mut self, args: &'t [CallArg<'t>]) -> Result<(), Opaque> {
        args.iter().try_for_each(|arg| match arg {
            CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => self.fixed(e),
        })
    }

    pub(super) fn expr(&mut self, e: &'t Expr<'t>) -> Result<Seen, Opaque> {
        match e {
            Expr::Const(value) => Ok(Seen::constant(&value.value)),
            Expr::Var(variable) => Ok(self.variable(variable.id)),
            Expr::Slice(slice) => {
                for border in [&slice.start, &slice.stop, &slice.step].into_iter().flatten() {
                    self.fixed(border)?;
                }
                let of = self.expr(&slice.expr)?;
                match of.kind {
                    Kind::Messages => Ok(of),
                    kind if kind.fixed() => Ok(Seen::FIXED),
                    _ => Err(Opaque),
                }
            }
            Expr::UnaryOp(unary) => match unary.op {
                UnaryOpKind::Not => Ok(Seen::known(self.expr(&unary.expr)?.truth.map(|truth| !truth))),
                UnaryOpKind::Neg => self.fixed(&unary.expr).map(|()| Seen::FIXED),
            },
            Expr::BinOp(binary) => self.binary(binary.op, &binary.left, &binary.right),
            Expr::Compare(compare) => match compare.ops.as_slice() {
                [only] => self.compare(&compare.expr, only.op, &only.expr),
                ops => {
                    self.fixed(&compare.expr)?;
                    ops.iter().try_for_each(|op| self.fixed(&op.expr))?;
                    Ok(Seen::FIXED)
                }
            },
            Expr::IfExpr(choice) => {
                let truth = self.expr(&choice.test_expr)?.truth;
                let mut other = || match &choice.false_expr {
                    Some(e) => self.expr(e),
                    None => Ok(Seen::sure(Kind::Absent)),
                };
                match truth {
                    Some(true) => self.expr(&choice.true_expr),
                    Some(false) => other(),
                    None => {
                        let other = other()?;
                        self.expr(&choice.true_expr)?.or(other)
                    }
                }
            }
            Expr::Filter(filter) => self.filter(filter),
            Expr::Test(test) => self.test(test),
            Expr::GetAttr(attribute) => {
                if matches!(&attribute.expr, Expr::Var(v) if v.id == "loop")
                    && matches!(attribute.name, "previtem" | "nextitem")
                {
                    // Of a loop over messages, or of any other but one over parts.
                    return match self.content {
                        Kind::Text => Ok(Seen {
                            sure: false,
                            ..Seen::sure(Kind::Message)
                        }),
                        _ => Err(Opaque),
                    };
                }
                let of = self.expr(&attribute.expr)?;
                match of.kind {
                    Kind::Message | Kind::Part => Ok(self.member(of, attribute.name)),
                    kind if kind.fixed() => Ok(Seen::FIXED),
                    _ => Err(Opaque),
                }
            }
            Expr::GetItem(item) => {
                let of = self.expr(&item.expr)?;
                let at = item.subscript_expr.as_const();
                let name = at.as_ref().and_then(Value::as_str);
                match (of.kind, name) {
                    (Kind::Message | Kind::Part, Some(name)) => Ok(self.member(of, name)),
                    (Kind::Messages, None) => {
                        self.fixed(&item.subscript_expr)?;
                        Ok(of.item(Kind::Message))
                    }
                    (Kind::Parts, None) => {
                        self.fixed(&item.subscript_expr)?;
                        Ok(of.item(Kind::Part))
                    }
                    (kind, _) if kind.fixed() => self.fixed(&item.subscript_expr).map(|()| Seen::FIXED),
                    _ => Err(Opaque),
                }
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => self.all_fixed(&list.items),
            Expr::Tuple(tuple) => self.all_fixed(&tuple.items),
            Expr::Map(map) => {
                self.all_fixed(&map.keys)?;
                self.all_fixed(&map.values)
            }
        }
    }

    fn variable(&self, name: &str) -> Seen {
        if let Some(seen) = self.assigned.get(name) {
            if self.scope.contains(&name) {
                return *seen;
            }
            return Seen {
                set: false,
                truth: seen.truth.filter(|truth| !truth),
                ..*seen
            };
        }
        match self.given.iter().rev().find(|(given, _)| *given == name) {
            Some((_, value)) => Seen::constant(value),
            // A function, `loop`, or not there.
            None => Seen::FIXED,
        }
    }

    fn binary(&mut self, op: BinOpKind, left: &'t Expr<'t>, right: &'t Expr<'t>) -> Result<Seen, Opaque> {
        match op {
            BinOpKind::ScAnd | BinOpKind::ScOr => {
                let left = self.expr(left)?;
                let decides = matches!(op, BinOpKind::ScOr);
                match left.truth {
                    Some(truth) if truth == decides => Ok(left),
                    Some(_) => self.expr(right),
                    None => {
                        let right = self.expr(right)?;
                        let truth = right.truth.filter(|truth| *truth == decides);
                        Ok(Seen {
                            truth,
                            ..left.or(right)?
                        })
                    }
                }
            }
            BinOpKind::Eq => self.compare(left, CompareOpKind::Eq, right),
            BinOpKind::Ne => self.compare(left, CompareOpKind::Ne, right),
            BinOpKind::In => self.compare(left, CompareOpKind::In, right),
            BinOpKind::Add | BinOpKind::Concat => {
                let (left, right) = (self.expr(left)?.kind, self.expr(right)?.kind);
                let may_join = |kind: Kind| kind.fixed() || matches!(kind, Kind::Text | Kind::Joined);
                match (left.fixed() && right.fixed(), may_join(left) && may_join(right)) {
                    (true, _) => Ok(Seen::FIXED),
                    (false, true) => Ok(Seen::sure(Kind::Joined)),
                    (false, false) => Err(Opaque),
                }
            }
            BinOpKind::Lt
            | BinOpKind::Lte
            | BinOpKind::Gt
            | BinOpKind::Gte
            | BinOpKind::Sub
            | BinOpKind::Mul
            | BinOpKind::Div
            | BinOpKind::FloorDiv
            | BinOpKind::Rem
            | BinOpKind::Pow => {
                self.fixed(left)?;
                self.fixed(right)?;
                Ok(Seen::FIXED)
            }
        }
    }

    fn compare(&mut self, left: &'t Expr<'t>, op: CompareOpKind, right: &'t Expr<'t>) -> Result<Seen, Opaque> {
        let (a, b) = (self.expr(left)?, self.expr(right)?);
        let negated = matches!(op, CompareOpKind::Ne | CompareOpKind::NotIn);
        let known = |truth: bool| Ok(Seen::known(Some(truth != negated)));
        let (left, right) = (left.as_const(), right.as_const());
        let word = |value: &Option<Value>| value.as_ref().and_then(Value::as_str).map(str::to_owned);
        let fixed = a.kind.fixed() && b.kind.fixed();
        match op {
            CompareOpKind::Eq | CompareOpKind::Ne if fixed => {
                let equal = match (word(&left), word(&right)) {
                    (None, Some(word)) => self.may_equal(a, &word),
                    (Some(word), None) => self.may_equal(b, &word),
                    _ => None,
                };
                equal.map_or(Ok(Seen::FIXED), known)
            }
            CompareOpKind::In | CompareOpKind::NotIn => match (word(&left), b.kind) {
                (Some(name), Kind::Message | Kind::Part) => match self.member(b, &name).kind {
                    Kind::Absent if b.sure => known(false),
                    _ => Ok(Seen::FIXED),
                },
                (Some(part), Kind::Text) if b.sure && !part.is_empty() => {
                    self.conditions.without(&part);
                    known(false)
                }
                _ if fixed => match right {
                    Some(list) if self.is_none_of(a, &list) => known(false),
                    _ => Ok(Seen::FIXED),
                },
                _ => Err(Opaque),
            },
            _ if fixed => Ok(Seen::FIXED),
            _ => Err(Opaque),
        }
    }

    /// Whether a role or a part's type is this word, where that is known.
    fn may_equal(&self, seen: Seen, word: &str) -> Option<bool> {
        if seen.is(Kind::Role) && !self.roles.contains(word) {
            return Some(false);
        }
        // A part that isn't there has no type either: that is an error.
        (seen.is(Kind::PartType) && seen.set).then_some(word == TEXT_TYPE)
    }

    /// Whether a role or a part's type is none of a constant list.
    fn is_none_of(&self, seen: Seen, list: &Value) -> bool {
        let other = |word: Value| {
            word.as_str()
                .is_some_and(|word| self.may_equal(seen, word) == Some(false))
        };
        list.as_str().is_none() && list.try_iter().is_ok_and(|mut words| words.all(other))
    }

    fn filter(&mut self, filter: &'t Filter<'t>) -> Result<Seen, Opaque> {
        self.fixed_args(&filter.args)?;
        let of = self.expr(filter.expr.as_ref().ok_or(Opaque)?)?;
        match (of.kind, filter.name) {
            (kind, _) if kind.fixed() => Ok(Seen::FIXED),
            (Kind::Text, "string") if of.sure => Ok(of),
            (Kind::Text, "trim") => self.stripped(of, &filter.args, true, true),
            (Kind::Text, "default" | "d") => of.or(Seen::FIXED),
            (Kind::Messages | Kind::Parts, "length" | "count") => Ok(Seen::FIXED),
            (Kind::Messages | Kind::Parts, "list" | "reverse") => Ok(of),
            (Kind::Messages, "first" | "last") => Ok(of.item(Kind::Message)),
            (Kind::Parts, "first" | "last") => Ok(of.item(Kind::Part)),
            (Kind::Messages, "selectattr" | "rejectattr") => match filter.args.first() {
                Some(CallArg::Pos(e)) if e.as_const().is_some_and(|name| name.as_str() == Some("role")) => Ok(of),
                _ => Err(Opaque),
            },
            _ => Err(Opaque),
        }
    }

    /// A text without what `args` name at its ends: under the condition that it has nothing of that there, the text.
    fn stripped(&mut self, of: Seen, args: &'t [CallArg<'t>], start: bool, end: bool) -> Result<Seen, Opaque> {
        let chars = match args {
            [] => None,
            [CallArg::Pos(e)] => {
                let chars = e.as_const().ok_or(Opaque)?;
                Some(chars.as_str().ok_or(Opaque)?.to_owned())
            }
            _ => return Err(Opaque),
        };
        self.conditions.without_at_ends(chars, start, end);
        Ok(of)
    }

    fn test(&mut self, test: &'t Test<'t>) -> Result<Seen, Opaque> {
        self.fixed_args(&test.args)?;
        let of = self.expr(&test.expr)?;
        let of_type = TYPES.iter().find(|(name, ..)| *name == test.name);
        let known = of.sure && of.set;
        let truth = match (of.kind, of_type) {
            (Kind::Absent, _) if known => match test.name {
                "undefined" => Some(true),
                "defined" | "none" | "string" | "mapping" => Some(false),
                _ => None,
            },
            (Kind::Nothing, _) if known => match test.name {
                "none" | "defined" => Some(true),
                "undefined" | "string" | "mapping" => Some(false),
                _ => None,
            },
            (kind, _) if kind.fixed() => None,
            (Kind::Text, Some((_, says, _))) | (Kind::Parts, Some((_, _, says))) => Some(*says).filter(|_| known),
            (_, Some(_)) => None,
            (_, None) => return Err(Opaque),
        };
        Ok(Seen::known(truth))
    }

    /// A member of a message that has a role and a text, and nothing else; or of its only part.
    fn member(&self, of: Seen, name: &str) -> Seen {
        let kind = match (of.kind, name) {
            (Kind::Part, "type") => Kind::PartType,
            (Kind::Part, "text") => Kind::Text,
            (Kind::Part, _) => Kind::Absent,
            (_, "role") => Kind::Role,
            (_, "content") => self.content,
            _ => Kind::Absent,
        };
        match of.sure {
            true => Seen::sure(kind),
            false if kind.fixed() => Seen::FIXED,
            false => Seen {
                sure: false,
                truth: None,
                ..Seen::sure(kind)
            },
        }
    }

    pub(super) fn call(&mut self, call: &'t Call<'t>) -> Result<Seen, Opaque> {
        if let Expr::Var(function) = &call.expr
            && self.assigned.contains_key(function.id)
        {
            return self.call_macro(function.id, &call.args);
        }
        self.fixed_args(&call.args)?;
        let (of, name) = match &call.expr {
            Expr::Var(function) => {
                let known = FUNCTIONS.contains(&function.id);
                return known.then_some(Seen::FIXED).ok_or(Opaque);
            }
            Expr::GetAttr(method) => (self.expr(&method.expr)?, method.name),
            _ => return Err(Opaque),
        };
        let first = match call.args.first() {
            Some(CallArg::Pos(e)) => e.as_const(),
            _ => None,
        };
        let first = first.as_ref().and_then(Value::as_str);
        match (of.kind, name) {
            (kind, _) if kind.fixed() => Ok(Seen::FIXED),
            (Kind::Message, "get") => match (first, call.args.len()) {
                (Some(field @ ("role" | "content")), _) => Ok(self.member(of, field)),
                // Python gives `none` here.
                (Some(_), 1) if of.sure => Ok(Seen::sure(Kind::Nothing)),
                (Some(_), _) => Ok(Seen::FIXED),
                (None, _) => Err(Opaque),
            },
            (Kind::Text, "startswith" | "endswith") if of.sure => match first {
                Some(part) if !part.is_empty() => {
                    self.conditions.without(part);
                    Ok(Seen::known(Some(false)))
                }
                _ => Err(Opaque),
            },
            (Kind::Text, "strip") => self.stripped(of, &call.args, true, true),
            (Kind::Text, "lstrip") => self.stripped(of, &call.args, true, false),
            (Kind::Text, "rstrip") => self.stripped(of, &call.args, false, true),
            _ => Err(Opaque),
        }
    }
}
