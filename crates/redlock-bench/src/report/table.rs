//! Tables in Markdown.

use std::fmt::{self, Display, Formatter};

/// A cell that says nothing.
pub(crate) const NOTHING: &str = "–";

/// The first column reads from the left, the others are figures. A column in which no row says anything is left out.
pub(crate) struct Table {
    titles: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self { titles: titles.iter().map(|&title| title.to_owned()).collect(), rows: Vec::new() }
    }

    /// As many cells as there are titles.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.titles.len());
        self.rows.push(cells);
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let speaks = |column: usize| column == 0 || self.rows.iter().any(|row| row[column] != NOTHING);
        let shown: Vec<usize> = (0..self.titles.len()).filter(|&column| speaks(column)).collect();
        let line = |cells: &[String]| {
            let cells: Vec<_> = shown.iter().map(|&column| cells[column].as_str()).collect();
            format!("| {} |", cells.join(" | "))
        };
        writeln!(f, "{}", line(&self.titles))?;
        let ruler: Vec<_> = shown.iter().map(|&column| if column == 0 { "---" } else { "---:" }).collect();
        writeln!(f, "| {} |", ruler.join(" | "))?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{}", line(row)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_that_says_nothing_is_left_out() {
        let mut table = Table::new(&["a", "b", "c"]);
        table.row(vec![NOTHING.into(), NOTHING.into(), "1".into()]);
        table.row(vec!["x".into(), NOTHING.into(), NOTHING.into()]);
        assert_eq!(table.to_string(), "| a | c |\n| --- | ---: |\n| – | 1 |\n| x | – |\n");
    }
}
