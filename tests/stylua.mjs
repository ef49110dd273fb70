// Formats the Lua files given and lists those that it changed, or with --check lists those that it would change.
// NODE_PATH names the folder that holds the package of StyLua.
import { readFileSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'

const stylua = createRequire(import.meta.url)('@johnnymorganz/stylua')
const check = process.argv[2] === '--check'
const unformatted = []
for (const path of process.argv.slice(check ? 3 : 2)) {
  const config = stylua.Config.new()
  config.syntax = stylua.LuaVersion.Lua51
  config.column_width = 120
  config.indent_type = stylua.IndentType.Spaces
  config.indent_width = 2
  config.quote_style = stylua.QuoteStyle.AutoPreferSingle
  config.collapse_simple_statement = stylua.CollapseSimpleStatement.ConditionalOnly
  const source = readFileSync(path, 'utf8')
  const formatted = stylua.formatCode(source, config, undefined, stylua.OutputVerification.Full)
  if (formatted === source) continue
  unformatted.push(path)
  if (!check) writeFileSync(path, formatted)
}
for (const path of unformatted) console.log(`${path}: ${check ? 'not formatted' : 'formatted'}`)
process.exit(check && unformatted.length > 0 ? 1 : 0)
