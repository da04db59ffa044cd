//! `docs/openapi.json`, which is made from the types of the methods.
//!
//! `UPDATE_EXPECT=1 cargo test -p rpc openapi` writes it.

use std::collections::BTreeMap;

use api::PROTOCOL;
use api::fault::{Fault, FaultCode};
use api::method::Method;
use expect_test::expect_file;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::methods::{self, Visitor};
use crate::protocol;

const JSON: &str = "application/json";
const OBJECTS: &str = "application/x-dominator-objects";

struct Document {
    generator: SchemaGenerator,
    paths: Map<String, Value>,
    /// What methods do, by their names.
    summaries: BTreeMap<String, String>,
    /// Samples with their schemas.
    samples: Vec<(&'static str, Value, Value)>,
}

impl Visitor for Document {
    fn method<M>(&mut self, (request, reply): (M::Request, M::Reply))
    where
        M: Method<Request: JsonSchema, Reply: JsonSchema>,
    {
        let request_schema = self.generator.subschema_for::<M::Request>().to_value();
        let reply_schema = self.generator.subschema_for::<M::Reply>().to_value();
        self.samples.push((M::NAME, request_schema.clone(), json!(request)));
        self.samples.push((M::NAME, reply_schema.clone(), json!(reply)));
        let streamed = json!({OBJECTS: {}});
        let body = |is_streamed: bool, schema: Value| match is_streamed {
            true => streamed.clone(),
            false => json!({JSON: {"schema": schema}}),
        };
        let sent = body(M::NAME == "ObjectServer.AddObjects", request_schema);
        let answered = body(M::NAME == "ObjectServer.GetObjects", reply_schema);
        let fault = json!({"$ref": "#/components/responses/Fault"});
        let (service, _) = M::NAME.split_once('.').unwrap();
        let operation = json!({
            "operationId": M::NAME,
            "tags": [service],
            "summary": self.summaries[M::NAME],
            "description": format!("Who may call it: {}.", M::ACCESS.describe()),
            "requestBody": {"content": sent},
            "responses": {
                "200": {"description": "The reply.", "content": answered},
                "4XX": fault,
                "5XX": fault,
            },
        });
        self.paths.insert(format!("/rpc/{}", M::NAME), json!({"post": operation}));
    }
}

impl Document {
    fn new() -> Self {
        let settings = SchemaSettings::draft2020_12()
            .with(|settings| settings.definitions_path = "/components/schemas".into());
        let mut document = Self {
            generator: settings.into_generator(),
            paths: Map::new(),
            summaries: protocol::summaries(),
            samples: Vec::new(),
        };
        methods::all(&mut document);
        document
    }

    fn value(&mut self) -> Value {
        let fault = self.generator.subschema_for::<Fault>().to_value();
        let codes = FaultCode::ALL.map(|code| format!("{} {}", code.status(), code.name()));
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": "Dominator",
                "version": PROTOCOL.to_string(),
                "description": "The methods of all daemons, in JSON. PROTOCOL.md describes calls, \
                                connections and errors. A property that is not required may be \
                                left out of a request; replies have all properties.",
            },
            "servers": [{
                "url": "https://{host}:{port}",
                "description": "The daemon that has the service: 6969 subd (Subd), 6970 dominator \
                                (Dominator), 6971 imageserver (ImageServer, ObjectServer), 6972 \
                                filegen-server (FileGenerator), 6973 mdbd (MdbServer).",
                "variables": {"host": {"default": "localhost"}, "port": {"default": "6970"}},
            }],
            "security": [{"certificate": []}],
            "paths": self.paths,
            "components": {
                "schemas": self.generator.take_definitions(true),
                "securitySchemes": {"certificate": {"type": "mutualTLS"}},
                "responses": {"Fault": {
                    "description": format!("Why it was not carried out. {}.", codes.join(", ")),
                    "content": {JSON: {"schema": fault}},
                }},
            },
        })
    }
}

#[test]
fn the_document_is_that_of_the_types() {
    let mut document = Document::new();
    let value = document.value();
    expect_file!["../../../../docs/openapi.json"]
        .assert_eq(&format!("{}\n", serde_json::to_string_pretty(&value).unwrap()));
    let validator = |schema: &Value| {
        let mut schema = schema.clone();
        if let Some(schema) = schema.as_object_mut() {
            schema.insert("components".into(), value["components"].clone());
        }
        jsonschema::validator_for(&schema).unwrap()
    };
    for (name, schema, sample) in &document.samples {
        let validator = validator(schema);
        let problems: Vec<String> =
            validator.iter_errors(sample).map(|error| error.to_string()).collect();
        assert_eq!(problems, Vec::<String>::new(), "{name}");
        // The schema does not allow just anything.
        assert!(sample.is_null() || !validator.is_valid(&json!("other")), "{name}");
    }
}
