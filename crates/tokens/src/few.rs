//! Mappings of a few keys for templates: looked through in their order, not hashed.
//!
//! A message has two or three keys, and a prompt's variables are a dozen; hashing each of them, and each look-up, by the
//! standard library's keyed hash took a quarter of a rendering's time.

use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};

/// Mappings with more keys are hashed.
const KEYS_MAX: usize = 16;

/// Pairs in their order; no key comes twice.
#[derive(Debug)]
struct Few(Vec<(Value, Value)>);

impl Few {
    fn find(&self, key: &str) -> Option<Value> {
        let mut pairs = self.0.iter();
        pairs
            .find(|(known, _)| known.as_str() == Some(key))
            .map(|(_, value)| value.clone())
    }
}

impl Object for Few {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.find(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.find(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

/// A mapping; of a key that comes twice the last value counts, at the first one's place.
pub(crate) fn mapping<'a>(pairs: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    let pairs = pairs.into_iter();
    let mut few: Vec<(Value, Value)> = Vec::with_capacity(pairs.size_hint().0.min(KEYS_MAX));
    let mut rest = pairs;
    while few.len() < KEYS_MAX {
        let Some((key, value)) = rest.next() else {
            return Value::from_object(Few(few));
        };
        match few.iter_mut().find(|(known, _)| known.as_str() == Some(key)) {
            Some((_, old)) => *old = value,
            None => few.push((Value::from(key), value)),
        }
    }
    let more = rest.map(|(key, value)| (Value::from(key), value));
    Value::from_pairs(few.into_iter().chain(more))
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;

    const KEYS: [&str; 24] = [
        "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t", "u", "v",
        "w", "x",
    ];

    /// What a template can do with a mapping.
    const USES: &str = "{{ m }} {{ m.b }} {{ m['c'] }} {{ m.none is defined }} {{ 'a' in m }} {{ 7 in m }} {{ m | length }} \
        {{ m is mapping }} {{ m is iterable }} {{ m | tojson }} {{ m == n }} {{ n == m }} {{ m == {'a': 1} }} {% for k, v in m | items \
        %}{{ k }}{{ v }}{% endfor %} {% for k in m %}{{ k }}{% endfor %} {{ m | list }} {{ m | dictsort }} {{ (m | bool) }} {{ m[7] is \
        defined }} {{ m < n }} {{ [m, n] | unique | length }} {{ dict(m, z=1) }}";

    #[test]
    fn a_template_sees_no_difference_to_a_hashed_mapping() {
        let environment = Environment::new();
        for keys in 0..KEYS.len() {
            let pairs = || {
                let twice = [("b", Value::from("again"))];
                let pairs = KEYS[..keys].iter().enumerate().map(|(i, key)| (*key, Value::from(i)));
                pairs.chain(twice.into_iter().filter(move |_| keys > 4))
            };
            let render = |m: Value, n: Value| {
                let template = environment.template_from_str(USES).unwrap();
                template.render(Value::from_pairs([("m", m), ("n", n)])).unwrap()
            };
            let (few, hashed) = (|| mapping(pairs()), || Value::from_pairs(pairs()));
            let want = render(hashed(), hashed());
            for (m, n) in [(few(), hashed()), (hashed(), few()), (few(), few())] {
                assert_eq!(render(m, n), want, "{keys} keys");
            }
        }
    }
}
