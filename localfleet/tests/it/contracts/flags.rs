//! The commands of all programs, and what each takes: names, value names, defaults, variables of
//! the environment. Help is not pinned.

use clap::{Arg, ArgAction, Command};
use expect_test::expect_file;
use localfleet::programs::command_lines;

/// One flag or word: its names, its value, and what is pinned of the rest.
fn line(argument: &Arg) -> String {
    let takes_value = argument.get_action().takes_values();
    let mut names: Vec<String> = Vec::new();
    names.extend(argument.get_short().map(|short| format!("-{short}")));
    let aliases = argument.get_all_aliases().unwrap_or_default();
    let longs = argument.get_long().into_iter().chain(aliases);
    names.extend(longs.map(|long| format!("--{long}")));
    let mut line = names.join(", ");
    if takes_value {
        let named = argument.get_value_names().unwrap_or_default();
        let named: Vec<String> = named.iter().map(|name| format!("<{name}>")).collect();
        if !line.is_empty() {
            line.push(' ');
        }
        // A value without a name of its own is called as its field, which nobody can type.
        line.push_str(&if named.is_empty() { "<_>".to_owned() } else { named.join(" ") });
        let choices = argument.get_possible_values();
        if !choices.is_empty() {
            let choices: Vec<&str> = choices.iter().map(|choice| choice.get_name()).collect();
            line.push_str(&format!("; one of {}", choices.join(", ")));
        }
        let defaults: Vec<String> =
            argument.get_default_values().iter().map(|value| format!("{value:?}")).collect();
        if !defaults.is_empty() {
            line.push_str(&format!("; default {}", defaults.join(", ")));
        }
        if let Some(number) = argument.get_num_args() {
            line.push_str(&format!("; {number} values"));
        }
        if let Some(delimiter) = argument.get_value_delimiter() {
            line.push_str(&format!("; divided by {delimiter:?}"));
        }
    }
    if matches!(argument.get_action(), ArgAction::Append | ArgAction::Count) {
        line.push_str("; may be repeated");
    }
    if let Some(variable) = argument.get_env() {
        line.push_str(&format!("; variable {}", variable.to_string_lossy()));
    }
    let marks = [
        (argument.is_required_set(), "; required"),
        (argument.is_global_set(), "; of all commands"),
        (argument.is_exclusive_set(), "; alone"),
        (argument.is_hide_set(), "; hidden"),
    ];
    for (is_so, mark) in marks {
        if is_so {
            line.push_str(mark);
        }
    }
    line
}

/// `command`, and all below it, in the order of the alphabet.
fn describe(path: &str, command: &Command, text: &mut String) {
    text.push_str(path);
    for alias in command.get_all_aliases() {
        text.push_str(&format!(", also {alias}"));
    }
    text.push('\n');
    for word in command.get_positionals() {
        text.push_str(&format!("  {}\n", line(word)));
    }
    let mut flags: Vec<String> = command.get_opts().map(line).collect();
    flags.sort_unstable_by_key(|line| line.trim_start_matches('-').to_owned());
    for flag in flags {
        text.push_str(&format!("  {flag}\n"));
    }
    let mut groups: Vec<String> = Vec::new();
    for group in command.get_groups() {
        let (required, many) = (group.is_required_set(), group.clone().is_multiple());
        let kind = match (required, many) {
            (true, true) => "at least one of",
            (true, false) => "exactly one of",
            (false, false) => "at most one of",
            (false, true) => continue,
        };
        let members = command
            .get_arguments()
            .filter(|argument| group.get_args().any(|member| member == argument.get_id()));
        let members: Vec<String> = members
            .map(|argument| match argument.get_long() {
                Some(long) => format!("--{long}"),
                None => line(argument),
            })
            .collect();
        // A group of one flag that is not needed says nothing.
        if members.len() > 1 || required {
            groups.push(format!("  ({kind} {})\n", members.join(", ")));
        }
    }
    groups.sort_unstable();
    text.extend(groups);
    let mut below: Vec<&Command> = command.get_subcommands().collect();
    below.sort_unstable_by_key(|command| command.get_name());
    for command in below {
        describe(&format!("{path} {}", command.get_name()), command, text);
    }
}

#[test]
fn commands_and_flags_keep_their_names_and_defaults() {
    let mut programs = command_lines();
    programs.sort_unstable_by_key(|command| command.get_name().to_owned());
    let mut text = String::new();
    for program in &programs {
        describe(program.get_name(), program, &mut text);
    }
    expect_file!["flags.txt"].assert_eq(&text);
}
