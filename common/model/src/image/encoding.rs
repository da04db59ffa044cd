//! How the signed part of an image travels: in format 1 without [`Content::signers`], so that
//! earlier releases read it; in format 2 with them, at the end.

use std::fmt;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{ComputedRule, Content, FORMAT, HealthCheck, ImageName};
use crate::filter::Filter;
use crate::object::ObjectId;
use crate::signing::ContentSigner;
use crate::trigger::Triggers;

const FIELDS: [&str; 8] =
    ["format", "name", "root", "filter", "triggers", "computed", "health_check", "signers"];

/// The fields of [`Content`] with their names, as JSON has them.
#[derive(Deserialize)]
struct Named {
    format: u32,
    name: ImageName,
    root: ObjectId,
    filter: Option<Filter>,
    triggers: Triggers,
    computed: Vec<ComputedRule>,
    health_check: Option<HealthCheck>,
    #[serde(default)]
    signers: Vec<ContentSigner>,
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { format, name, root, filter, triggers, computed, health_check, signers } = self;
        let has_signers = *format != FORMAT;
        let count = FIELDS.len() - usize::from(!has_signers);
        let mut fields = serializer.serialize_struct("Content", count)?;
        fields.serialize_field("format", format)?;
        fields.serialize_field("name", name)?;
        fields.serialize_field("root", root)?;
        fields.serialize_field("filter", filter)?;
        fields.serialize_field("triggers", triggers)?;
        fields.serialize_field("computed", computed)?;
        fields.serialize_field("health_check", health_check)?;
        if has_signers {
            fields.serialize_field("signers", signers)?;
        }
        fields.end()
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("Content", &FIELDS, ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the signed part of an image")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Content, A::Error> {
        let Named { format, name, root, filter, triggers, computed, health_check, signers } =
            Named::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Content { format, name, root, filter, triggers, computed, health_check, signers })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Content, A::Error> {
        let format = next(&mut fields)?;
        Ok(Content {
            format,
            name: next(&mut fields)?,
            root: next(&mut fields)?,
            filter: next(&mut fields)?,
            triggers: next(&mut fields)?,
            computed: next(&mut fields)?,
            health_check: next(&mut fields)?,
            signers: if format == FORMAT { Vec::new() } else { next(&mut fields)? },
        })
    }
}

fn next<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(fields: &mut A) -> Result<T, A::Error> {
    fields.next_element()?.ok_or_else(|| A::Error::custom("the image is cut short"))
}
