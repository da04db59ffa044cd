//! What an operator ordered: every order is recorded before it is acted on.
//!
//! An order that changes durable state is recorded with that state, in one transaction
//! (`State::set_ordered`, `State::transact`); any other is recorded by `Fleet::audit` before
//! anything is done. One that cannot be recorded is refused. The brake alone is pulled in memory
//! all the same.
// tidy: core

use std::fmt::Display;

/// The longest text of an order, in bytes.
pub const ORDER_TEXT_MAX: usize = 4_096;

/// One order, as the audit tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// What was ordered: the name of the command.
    pub verb: &'static str,
    /// What it was about: a machine, an image; empty for the whole fleet.
    pub about: String,
    /// Who ordered it.
    pub who: String,
    /// Why; empty if nobody said.
    pub why: String,
}

impl Order {
    /// The order `verb`, given by `who`, about the whole fleet and without a reason.
    #[must_use]
    pub fn of(verb: &'static str, who: &str) -> Self {
        Self { verb, about: String::new(), who: who.to_owned(), why: String::new() }
    }

    /// The same, about this machine or image.
    #[must_use]
    pub fn about(self, about: impl Display) -> Self {
        Self { about: about.to_string(), ..self }
    }

    /// The same, for this reason.
    #[must_use]
    pub fn why(self, why: &str) -> Self {
        Self { why: why.to_owned(), ..self }
    }

    /// True if all of its texts are short enough to be recorded.
    #[must_use]
    pub fn is_short(&self) -> bool {
        [&self.about, &self.who, &self.why].iter().all(|text| text.len() <= ORDER_TEXT_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_put_together_and_are_short() {
        let order = Order::of("retry", "ann").about("web1").why("repaired");
        let (about, who, why) = ("web1".to_owned(), "ann".to_owned(), "repaired".to_owned());
        assert_eq!(order, Order { verb: "retry", about, who, why });
        let long = "x".repeat(ORDER_TEXT_MAX + 1);
        assert!(order.is_short() && order.clone().why(&long[1..]).is_short());
        for order in [order.clone().about(&long), order.why(&long), Order::of("x", &long)] {
            assert!(!order.is_short());
        }
    }
}
