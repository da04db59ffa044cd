//! Orders the new and changed entries of a plan: libraries before executables, boot files last.
//!
//! Programs may start and load libraries during an update. A new library before its program does no
//! harm; in the other order the program fails.

use std::collections::BTreeMap;

use super::{Action, Operation};
use crate::path::TreePath;
use crate::tree::{Leaf, Node};

/// When an operation becomes visible, relative to others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Library,
    Other,
    Executable,
    Boot,
}

/// Sorts the puts of a plan, given in component order, by class and then by path.
///
/// What is put inside a directory that is itself new becomes visible with that directory, so it
/// takes that directory's class. A hard link comes after the file that it names.
pub(super) fn order_puts(puts: Vec<Operation>) -> Vec<Operation> {
    let groups = groups(&puts);
    let mut classes: Vec<Class> = puts.iter().map(class_of).collect();
    for (index, &group) in groups.iter().enumerate() {
        if group != index {
            classes[index] = classes[group];
        }
    }
    raise_links(&puts, &groups, &mut classes);
    let mut numbered: Vec<(Class, usize, Operation)> = puts
        .into_iter()
        .enumerate()
        .map(|(index, operation)| (classes[groups[index]], index, operation))
        .collect();
    // The index stands for the path: the puts came in component order.
    numbered.sort_by_key(|(class, index, _)| (*class, *index));
    numbered.into_iter().map(|(_, _, operation)| operation).collect()
}

/// For each put the index of the outermost new directory that holds it, or its own.
fn groups(puts: &[Operation]) -> Vec<usize> {
    let mut groups = Vec::with_capacity(puts.len());
    let mut open: Option<(usize, &TreePath)> = None;
    for (index, operation) in puts.iter().enumerate() {
        match open {
            Some((group, path)) if operation.path.starts_with(path) => groups.push(group),
            _ => {
                groups.push(index);
                open = makes_directory(&operation.action).then_some((index, &operation.path));
            }
        }
    }
    groups
}

fn makes_directory(action: &Action) -> bool {
    match action {
        Action::Create(node) | Action::Replace { node, .. } => node.is_directory(),
        Action::Change(_) | Action::Remove => false,
    }
}

/// Raises the class of each group that holds a hard link to that of the group of its file.
fn raise_links(puts: &[Operation], groups: &[usize], classes: &mut [Class]) {
    let index_of: BTreeMap<&TreePath, usize> =
        puts.iter().enumerate().map(|(index, operation)| (&operation.path, index)).collect();
    let links: Vec<(usize, usize)> = puts
        .iter()
        .enumerate()
        .filter_map(|(index, operation)| match &operation.action {
            Action::Create(Node::Leaf(Leaf::HardLink(first)))
            | Action::Replace { node: Node::Leaf(Leaf::HardLink(first)), .. } => {
                Some((groups[index], groups[*index_of.get(first)?]))
            }
            _ => None,
        })
        .collect();
    // Classes only rise and there are four, so this ends.
    loop {
        let mut raised = false;
        for &(link, file) in &links {
            if classes[link] < classes[file] {
                classes[link] = classes[file];
                raised = true;
            }
        }
        if !raised {
            return;
        }
    }
}

fn class_of(operation: &Operation) -> Class {
    let path = &operation.path;
    let first = path.components().next().unwrap_or_default();
    if first == b"boot" || first.starts_with(b"vmlinuz") || first.starts_with(b"initrd") {
        return Class::Boot;
    }
    let node = match &operation.action {
        Action::Create(node) | Action::Replace { node, .. } | Action::Change(node) => node,
        Action::Remove => return Class::Other,
    };
    let name = path.name();
    let is_library = name.ends_with(b".so") || name.windows(4).any(|window| window == b".so.");
    match node {
        Node::Directory(_) => Class::Other,
        Node::Leaf(_) if is_library => Class::Library,
        Node::Leaf(Leaf::File(file)) if file.metadata.mode & 0o111 != 0 => Class::Executable,
        Node::Leaf(_) => Class::Other,
    }
}
