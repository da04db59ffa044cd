//! Tries all orders of the steps of several parties in a model of a store.

mod bucket;
mod removal;

use std::collections::HashSet;
use std::fmt::Debug;

/// A model of a store and of what is known of it.
pub trait World: Clone + Debug {
    /// True if no image lacks anything.
    fn is_whole(&self) -> bool;

    /// True if all is there that somebody was told of who still counts on it.
    fn keeps_promises(&self) -> bool;

    /// True if there is something that nothing needs or holds.
    fn has_garbage(&self) -> bool;
}

/// Somebody who does something in a world, a step at a time.
pub trait Party<W>: Clone + Debug {
    /// Takes the next step; gives what is then left to do. `None` if there is nothing to do now.
    fn step(&self, world: &mut W) -> Option<Self>;

    /// True if there will never be anything to do.
    fn is_done(&self) -> bool;
}

/// What came of all orders.
#[derive(Debug, Default)]
pub struct Found {
    /// States of the world and the parties.
    pub states: usize,
    /// An image lacked an object in some state.
    pub broken_images: usize,
    /// An object was gone that somebody was told of who counts on it.
    pub broken_promises: usize,
    /// Ends in which objects are left that nothing needs or holds.
    pub garbage: usize,
    /// Ends in which somebody waits for ever.
    pub stuck: usize,
    /// States in which nobody can take a step.
    pub ends: usize,
}

/// Lets `parties` take their steps in `world` in all orders there are.
pub fn explore<W: World, P: Party<W>>(world: W, parties: &[P]) -> Found {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    let mut stack = vec![(world, parties.to_vec())];
    while let Some((world, parties)) = stack.pop() {
        if !seen.insert(format!("{world:?}{parties:?}")) {
            continue;
        }
        found.states += 1;
        found.broken_images += usize::from(!world.is_whole());
        found.broken_promises += usize::from(!world.keeps_promises());
        let mut is_end = true;
        for (at, party) in parties.iter().enumerate() {
            let (mut world, mut parties) = (world.clone(), parties.clone());
            if let Some(next) = party.step(&mut world) {
                parties[at] = next;
                is_end = false;
                stack.push((world, parties));
            }
        }
        if is_end {
            found.ends += 1;
            found.stuck += usize::from(!parties.iter().all(Party::is_done));
            found.garbage += usize::from(world.has_garbage());
        }
    }
    found
}

/// Makes sure that nothing was wrong in any order.
pub fn expect_all_well(all: &[Found]) {
    for found in all {
        println!("{found:?}");
        assert!(found.states > 100 && found.ends > 0, "{found:?}");
        let wrong = [found.broken_images, found.broken_promises, found.garbage, found.stuck];
        assert_eq!(wrong, [0; 4], "{found:?}");
    }
}

/// Makes sure that something was lost in some order.
pub fn expect_loss(all: &[Found], why: &impl Debug) {
    let wrong = all.iter().map(|found| found.broken_images + found.broken_promises);
    assert!(wrong.sum::<usize>() > 0, "{why:?}: {all:?}");
}
