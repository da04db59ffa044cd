//! Orders about daemon tasks that machines have not taken yet.
//!
//! # Invariants
//!
//! * An order has a number above all that the machine has told of the task. The machine obeys the
//!   order with the highest number, so one of a restored backup changes nothing.
//! * Of orders that undo each other only the last is kept; those that are kept are given in the
//!   order of their numbers.
// tidy: core

use std::collections::BTreeMap;

use api::dominator::tasks::WantedTaskOrder;
use model::task_order::{TaskOrder, next_of_dominator};
use serde::{Deserialize, Serialize};

/// The orders of each machine, by the number of the order for each task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskOrders(BTreeMap<String, Vec<WantedTaskOrder>>);

impl TaskOrders {
    /// Returns the orders about tasks of a machine, in the order in which they are given.
    #[must_use]
    pub fn of(&self, hostname: &str) -> &[WantedTaskOrder] {
        self.0.get(hostname).map_or(&[], Vec::as_slice)
    }

    /// Adds an order about a task of which the machine has told the number `told`. Its own number
    /// is set. Returns that.
    pub fn want(&mut self, hostname: &str, order: WantedTaskOrder, told: u64) -> u64 {
        let orders = self.0.entry(hostname.to_owned()).or_default();
        let of_task = orders.iter().filter(|one| one.task == order.task);
        let highest = of_task.map(|one| one.number).fold(told, u64::max);
        let number = next_of_dominator(highest);
        let subject = subject(order.order);
        orders.retain(|one| one.task != order.task || self::subject(one.order) != subject);
        orders.push(WantedTaskOrder { number, ..order });
        number
    }

    /// Adds the order that ends what a machine suspended because it had left a machine database, as
    /// [`Self::want`], unless an order that was given since decides.
    pub fn want_back(&mut self, hostname: &str, order: WantedTaskOrder, told: u64) {
        let decides = |one: &WantedTaskOrder| {
            one.task == order.task && subject(one.order) == subject(order.order)
        };
        if !self.of(hostname).iter().any(decides) {
            self.want(hostname, order, told);
        }
    }

    /// Forgets the orders about a task up to this number.
    pub fn forget(&mut self, hostname: &str, task: &str, number: u64) {
        if let Some(orders) = self.0.get_mut(hostname) {
            orders.retain(|one| one.task != task || one.number > number);
            if orders.is_empty() {
                self.0.remove(hostname);
            }
        }
    }

    /// Forgets those of machines that are not `known`. Returns true if there were any.
    pub fn forget_unknown<V>(&mut self, known: &BTreeMap<String, V>) -> bool {
        let before = self.0.len();
        self.0.retain(|hostname, _| known.contains_key(hostname));
        self.0.len() < before
    }
}

/// What an order decides. A later order about the same replaces it.
fn subject(order: TaskOrder) -> u8 {
    match order {
        TaskOrder::Hold | TaskOrder::Release => 0,
        TaskOrder::Suspend | TaskOrder::Resume => 1,
        TaskOrder::Restart | TaskOrder::Start => 2,
    }
}

#[cfg(test)]
mod tests {
    use model::tree::Time;

    use super::*;

    fn order(task: &str, order: TaskOrder) -> WantedTaskOrder {
        let (task, why, who) = (task.to_owned(), "why".to_owned(), "ann".to_owned());
        WantedTaskOrder { task, order, why, who, since: Time::default(), number: 0 }
    }

    fn numbers(orders: &TaskOrders, hostname: &str) -> Vec<(String, &'static str, u64)> {
        let orders = orders.of(hostname).iter();
        orders.map(|one| (one.task.clone(), one.order.name(), one.number)).collect()
    }

    #[test]
    fn orders_have_rising_numbers_and_replace_those_that_they_undo() {
        use TaskOrder::{Hold, Release, Restart, Suspend};
        let mut orders = TaskOrders::default();
        let table =
            [("a", Hold, 3, 4), ("a", Suspend, 3, 6), ("b", Hold, 0, 2), ("a", Release, 3, 8)];
        for (task, given, told, number) in table {
            assert_eq!(orders.want("web1", order(task, given), told), number);
        }
        let (a, b) = ("a".to_owned(), "b".to_owned());
        let kept = [(a.clone(), "suspend", 6), (b, "hold", 2), (a, "release", 8)];
        assert_eq!(numbers(&orders, "web1"), kept);
        // The machine's operator was faster.
        assert_eq!(orders.want("web1", order("b", Restart), 7), 8);
        // It stays suspended, as an operator wants; the other one does not.
        orders.want_back("web1", order("a", TaskOrder::Resume), 9);
        orders.want_back("web2", order("a", TaskOrder::Resume), 3);
        assert_eq!(numbers(&orders, "web2"), [("a".to_owned(), "resume", 4)]);
        orders.forget("web2", "a", 4);
        let saved = serde_json::to_string(&orders).unwrap();
        assert_eq!(serde_json::from_str::<TaskOrders>(&saved).unwrap(), orders);
        orders.forget("web1", "a", 6);
        orders.forget("web1", "b", 8);
        assert_eq!(numbers(&orders, "web1"), [("a".to_owned(), "release", 8)]);
        assert!(!orders.forget_unknown(&BTreeMap::from([("web1".to_owned(), ())])));
        assert!(orders.forget_unknown(&BTreeMap::from([("web2".to_owned(), ())])));
        assert_eq!(orders, TaskOrders::default());
    }
}
