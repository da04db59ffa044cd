//! Resource files, bindings, states, and answers of plugins.

use ::provisioning::protocol::{Answer, PlanAnswer};
use ::provisioning::version::{Range, Version};
use ::provisioning::{Bindings, Next, Resources, State, plan};

/// Reads a resource file, bindings, a state and an answer, with zeros between them; then plans, and
/// gives the answer to each call that would be made.
pub fn provisioning(bytes: &[u8]) {
    let mut parts = bytes.splitn(4, |byte| *byte == 0);
    let mut text = || std::str::from_utf8(parts.next().unwrap_or_default()).unwrap_or_default();
    let (file, bindings, state, answer) = (text(), text(), text(), text());
    version(file);
    let _plan = PlanAnswer::parse(answer.as_bytes());
    let answer = Answer::parse(answer.as_bytes());
    let resources = Resources::parse([("file.json", file)]).unwrap_or_default();
    let bindings = Bindings::parse(bindings).unwrap_or_default();
    let mut state = State::parse(state).unwrap_or_else(|_| State::new("machine"));
    state.retry();
    for _ in 0..4 {
        let plan = plan(&resources, &bindings, &state);
        let Next::Calls(calls) = plan.next(&state) else { break };
        for call in calls {
            state.begin(&call);
            state.end(&call, answer.clone().map_err(|error| error.to_string()));
        }
        let written = serde_json::to_string(&state).expect("a state is JSON");
        let read = State::parse(&written).expect("what was written is read");
        assert_eq!(serde_json::to_string(&read).ok().as_ref(), Some(&written));
    }
}

fn version(text: &str) {
    if let Ok(version) = text.parse::<Version>() {
        assert_eq!(version.to_string().parse(), Ok(version));
    }
    if let Ok(range) = text.parse::<Range>() {
        assert_eq!(range.to_string().parse(), Ok(range));
    }
}
