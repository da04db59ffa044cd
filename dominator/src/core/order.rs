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

/// Why an order with such texts is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderTextError {
    /// It is not said why, and has to be.
    #[error("say why {ordered}")]
    NoReason {
        /// What is ordered, in words.
        ordered: &'static str,
    },
    /// A text is too long to be recorded.
    #[error("a reason, and each other text of an order, has at most {ORDER_TEXT_MAX} bytes")]
    TooLong,
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

    /// The same, if all of its texts are short enough to be recorded.
    ///
    /// # Errors
    ///
    /// [`OrderTextError::TooLong`].
    pub fn checked(self) -> Result<Self, OrderTextError> {
        let is_short = |text: &String| text.len() <= ORDER_TEXT_MAX;
        let are_short = [&self.about, &self.who, &self.why].into_iter().all(is_short);
        if are_short { Ok(self) } else { Err(OrderTextError::TooLong) }
    }

    /// As [`Order::checked`], of an order that needs a reason; `ordered` is what is ordered, in
    /// words that follow upon "say why".
    ///
    /// # Errors
    ///
    /// [`OrderTextError`].
    pub fn reasoned(self, ordered: &'static str) -> Result<Self, OrderTextError> {
        if self.why.trim().is_empty() {
            return Err(OrderTextError::NoReason { ordered });
        }
        self.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_put_together_and_their_texts_are_short_and_say_why() {
        let order = Order::of("retry", "ann").about("web1").why("repaired");
        let (about, who, why) = ("web1".to_owned(), "ann".to_owned(), "repaired".to_owned());
        assert_eq!(order, Order { verb: "retry", about, who, why });
        let long = "x".repeat(ORDER_TEXT_MAX + 1);
        assert_eq!(order.clone().checked(), Ok(order.clone()));
        assert_eq!(order.clone().reasoned("it is"), Ok(order.clone()));
        assert!(order.clone().why(&long[1..]).checked().is_ok());
        for order in [order.clone().about(&long), order.why(&long), Order::of("x", &long)] {
            assert_eq!(order.checked(), Err(OrderTextError::TooLong));
        }
        for why in ["", " \t"] {
            let order = Order::of("resume-image", "ann").why(why);
            assert!(order.clone().checked().is_ok());
            let error = order.reasoned("it is to go on").unwrap_err();
            assert_eq!(error.to_string(), "say why it is to go on");
        }
    }
}
