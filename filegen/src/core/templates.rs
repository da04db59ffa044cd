//! Templates: compiled once, rendered for each machine.
//!
//! A template sees the record of the machine under the names of the machine database, the variables
//! of its generator as `Variables`, and the outputs of the machine's resources as `Resources`, by
//! id. Undefined names are errors. It cannot read files or include other templates.
// tidy: core

use std::collections::BTreeSet;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};

/// The name of the variables in templates.
pub const VARIABLES: &str = "Variables";

/// The name of the outputs of resources in templates.
pub const RESOURCES: &str = "Resources";

/// How much work a rendering may do, in units of minijinja: one for each instruction and for each
/// 64 bytes that are made. It ends a loop for ever after about 0.1 s, and text after 64 MiB.
const FUEL: u64 = 1_000_000;

/// The name of the one template of an environment.
const NAME: &str = "template";

/// A template that is not valid, or fails for a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct TemplateError {
    /// The line of the template, from 1; 0 if it is not known.
    pub line: usize,
    /// It may have values of the record and the variables.
    pub why: String,
}

impl TemplateError {
    fn of(error: &Error) -> Self {
        let detail = error.detail().map_or_else(String::new, |detail| format!(": {detail}"));
        let why = match error.kind() {
            ErrorKind::OutOfFuel => {
                "it takes too much time or memory; is there a loop without end?".to_owned()
            }
            kind => format!("{kind}{detail}"),
        };
        Self { line: error.line().unwrap_or_default(), why }
    }
}

/// A compiled template with its variables.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
}

impl Template {
    /// Compiles `source`.
    ///
    /// # Errors
    ///
    /// [`TemplateError`] names the line.
    pub fn new(source: String, variables: Option<Value>) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
        environment.set_syntax(syntax.expect("these are the usual delimiters"));
        environment.set_fuel(Some(FUEL));
        if let Some(variables) = variables {
            environment.add_global(VARIABLES, variables);
        }
        environment.add_template_owned(NAME, source).map_err(|error| TemplateError::of(&error))?;
        Ok(Self { environment })
    }

    /// Returns the ids of the resources whose outputs it uses, as `Resources.ID`, sorted; `*` if it
    /// uses them in another way.
    #[must_use]
    pub fn resources(&self) -> Vec<String> {
        let template = self.environment.get_template(NAME);
        let names = template.map(|template| template.undeclared_variables(true));
        let names = names.unwrap_or_default().into_iter();
        let id = |name: String| {
            let rest = name.strip_prefix(RESOURCES)?;
            if rest.is_empty() {
                return Some("*".to_owned());
            }
            Some(rest.strip_prefix('.')?.split('.').next()?.to_owned())
        };
        let ids: BTreeSet<String> = names.filter_map(id).collect();
        ids.into_iter().collect()
    }

    /// Renders the template for a machine, whose record is `machine`.
    ///
    /// # Errors
    ///
    /// [`TemplateError`] names the line.
    pub fn render(&self, machine: &Value) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME);
        let rendered = template.and_then(|template| template.render(machine.clone()));
        rendered.map_err(|error| {
            let mut failed = TemplateError::of(&error);
            let used = self.resources();
            if error.kind() == ErrorKind::UndefinedError && !used.is_empty() {
                failed.why.push_str(&format!(
                    "; it uses the outputs of {}, which a machine tells when it has an image with \
                     these resources",
                    used.join(", ")
                ));
            }
            failed
        })
    }
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use model::mdb::Machine;

    use super::*;

    fn render(source: &str) -> Result<String, String> {
        let machine = Machine {
            hostname: "web1".into(),
            location: "nyc/r4".into(),
            tags: [("tier".to_owned(), "front & <b>".to_owned())].into(),
            ..Machine::default()
        };
        let variables = serde_json::json!({"servers": {"nyc": ["10.0.0.1", "10.0.0.2"]}});
        let template = Template::new(source.to_owned(), Some(Value::from(Serde(variables))));
        let rendered = template.and_then(|template| template.render(&Value::from(Serde(machine))));
        rendered.map_err(|error| error.to_string())
    }

    #[test]
    fn a_template_sees_the_record_and_the_variables() {
        let source = "\
            # {{ Hostname }} in {{ Location }}\n\
            {% for server in Variables.servers[Location | split('/') | first] -%}\n\
            nameserver {{ server }}\n\
            {% endfor %}options {{ Tags.tier }}\n";
        let expected = "# web1 in nyc/r4\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n\
                        options front & <b>\n";
        assert_eq!(render(source).as_deref(), Ok(expected));
        assert_eq!(render("a\n\n").as_deref(), Ok("a\n\n"));
        assert_eq!(render("").as_deref(), Ok(""));
    }

    #[test]
    fn a_template_sees_the_outputs_of_resources() {
        let source = "{{ Resources.db.port }}{% if Resources.net %}, {{ Resources.net.name }}\
                      {% endif %}";
        let template = Template::new(source.to_owned(), None).unwrap();
        assert_eq!(template.resources(), ["db", "net"]);
        let subscript = "{{ Resources['web-db'].port }}";
        assert_eq!(Template::new(subscript.to_owned(), None).unwrap().resources(), ["*"]);
        let with = |outputs: serde_json::Value| {
            let rendered = template.render(&Value::from(Serde(outputs)));
            rendered.map_err(|error| error.to_string())
        };
        let both = serde_json::json!({"Resources": {"db": {"port": 5432}, "net": {"name": "n"}}});
        assert_eq!(with(both).as_deref(), Ok("5432, n"));
        let none = serde_json::json!({"Resources": {}});
        let error = "line 1: undefined value; it uses the outputs of db, net, which a machine \
                     tells when it has an image with these resources";
        assert_eq!(with(none), Err(error.to_owned()));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let loops =
            "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
        let large = "{% set x = 'x' * 90000000 %}";
        let doubled = format!("{{% set a = 'x' %}}{}", "{% set a = a ~ a %}".repeat(40));
        let too_much = "line 1: it takes too much time or memory; is there a loop without end?";
        let table = [
            ("a\n{{ Hostnme }}", "line 2: undefined value"),
            ("{{ Tags.rack }}", "line 1: undefined value"),
            ("{{ Variables.none.more }}", "line 1: undefined value"),
            ("a\nb\n{% if %}", "line 3: syntax error: "),
            ("{{ Hostname ", "line 1: syntax error: "),
            ("{% include 'other' %}", "line 1: syntax error: unknown statement include"),
            ("\n{{ Hostname | nothing }}", "line 2: unknown filter: "),
            (loops, too_much),
            (large, too_much),
            (&doubled, too_much),
        ];
        for (source, expected) in table {
            let error = render(source).unwrap_err();
            assert!(error.starts_with(expected), "{source}: {error}");
        }
    }
}
